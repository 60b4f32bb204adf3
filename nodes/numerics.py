"""Which worker groups compute the same bits, and which are slower than they could be, by what they announce. Pure.

Groups of one mesh may run on unequal machines. A request that moves to a group of other numerics continues with other
bits: its text is as good, but not the text that it would have had. With other weights it is another model's.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from mesh.membership.view import Member
from nodes.roles import SCHEDULER, WORKER


class Bits(NamedTuple):
    """What a group computes with (`ModelSpec.fingerprint`) and how (`Runner.numerics`), as its scheduler announces it.

    Groups of equal ones compute the same bits, as far as both parts are known (not empty).
    """

    weights: str = ""
    numerics: str = ""

    @property
    def are_known(self) -> bool:
        return "" not in self


UNKNOWN_BITS: Final = Bits()


def scheduler_bits(members: Iterable[Member]) -> dict[str, Bits]:
    """Of the schedulers that announce numerics, in whatever state, by actor id."""
    members = list(members)
    weights = {one.actor_id: _text(one, "weights") for one in members}
    return {name: Bits(weights[name], numerics) for name, numerics in scheduler_numerics(members).items()}


def scheduler_numerics(members: Iterable[Member]) -> dict[str, str]:
    """Fingerprints of the schedulers that announce one, in whatever state, by actor id."""
    return {one.actor_id: numerics for one in members if one.role == SCHEDULER and (numerics := _text(one, "numerics"))}


def is_same_bits(numerics: str) -> bool:
    """Whether a worker of this fingerprint computes a row to the same bits, whatever is computed with it."""
    return "varies" not in numerics.split("/")


def numerics_note(members: Iterable[Member]) -> str:
    """A line for people if groups announce unequal numerics; else empty."""
    groups = _unequal(members, "numerics")
    return groups and f"worker groups compute with different numerics, so their results are not bit-identical: {groups}"


def weights_note(members: Iterable[Member]) -> str:
    """A line for people if groups announce unequal weights; else empty."""
    groups = _unequal(members, "weights")
    return groups and f"worker groups serve different weights, so they exchange no KV and answers differ: {groups}"


def kernels_note(members: Iterable[Member]) -> str:
    """Why workers use slower kernels than they could, each reason once; else empty."""
    notes = {_text(member, "kernels") for member in members if member.role == WORKER}
    return "; ".join(sorted(notes - {""}))


def quantization_note(members: Iterable[Member]) -> str:
    """A line for people if workers compute with rounded weights, naming the format; else empty."""
    found = {_text(member, "quantization") for member in members if member.role == WORKER} - {"", "none"}
    return f"weights are {' and '.join(sorted(found))}, rounded when they were loaded" if found else ""


def _unequal(members: Iterable[Member], attribute: str) -> str:
    """`a, c (x); b (y)`: which groups' schedulers announce what; empty unless there are two values."""
    groups: dict[str, set[str]] = {}
    for member in members:
        if member.role == SCHEDULER and (value := _text(member, attribute)):
            groups.setdefault(value, set()).add(_text(member, "group") or member.actor_id)
    sets = sorted((sorted(names), value) for value, names in groups.items())
    return "; ".join(f"{', '.join(names)} ({value})" for names, value in sets) if len(sets) > 1 else ""


def _text(member: Member, name: str) -> str:
    value = member.attributes.get(name)
    return value if isinstance(value, str) else ""
