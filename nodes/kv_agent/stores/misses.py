"""Why an agent did not find pages of a prompt: in runs, for the scheduler that asked. Pure."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvstore.protocol import BEHIND_A_GAP, LOADING, NEVER_STORED, NOT_OPEN, OTHER_NUMERICS, MissedPages

if TYPE_CHECKING:
    from kvstore.store.interface import Store


def misses(store: "Store", hashes: Sequence[bytes], others: Iterable["Store"]) -> list[MissedPages]:
    """Reasons for `hashes`, which follow what `store` has of a prompt; `others` have pages of other numerics."""
    if not hashes:
        return []
    if not store.is_loaded:
        return [MissedPages(why=NOT_OPEN if store.why_off else LOADING, num=len(hashes))]
    whys = store.missing.whys(hashes)
    for number, is_held in enumerate(store.holds(hashes)):
        if is_held:
            # Whatever was remembered of it: it is there again, but not what it continues.
            whys[number] = BEHIND_A_GAP
    for other in others:
        for number, is_held in enumerate(other.holds(hashes)):
            whys[number] = whys[number] or (OTHER_NUMERICS if is_held else "")
    return [MissedPages(why=why or NEVER_STORED, num=len([*run])) for why, run in groupby(whys)]
