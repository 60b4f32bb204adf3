"""What became of a prompt's pages, in words: run by run for `meshctl kv why`, in one line for `trace`. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from nodes.protocol.stores import PageRun, PromptFate

_HAD: Final = {"cached": "cached", "restored": "read from the disk"}
_WHYS: Final = {
    "no_store": "nothing is kept on disk",
    "no_worker": "it was not known yet how pages are computed",
    "short": "computing takes less than asking the disk",
    "late": "the disk's answer had not come within 5 ms",
    "no_answer": "the agent did not answer",
    "left_pool": "they had left the pool when their turn came",
    "dearer": "reading takes longer than computing",
    "timed_out": "the disk did not read them in time",
    "revoked": "their memory was needed, or the request was given up",
    "failed": "reading failed",
    "never_stored": "never stored, as far as is remembered",
    "evicted": "evicted for others",
    "corrupt": "refused by checksum",
    "unsigned": "refused by signature",
    "unreadable": "the disk could not read them",
    "queue_full": "dropped, too many waited to be written",
    "changed": "dropped, used again before they were written",
    "write_failed": "dropped, the disk did not write them",
    "read_only": "dropped, the store is only read",
    "flushed": "flushed by an operator",
    "lost": "the store's files were taken away",
    "not_open": "the store was not open",
    "loading": "what the store has was still being read",
    "other_numerics": "other numerics",
    "behind_a_gap": "stored, but not what comes before them",
}


def what(why: str) -> str:
    """What became of a run of pages."""
    return _HAD.get(why) or f"computed: {_WHYS.get(why, why)}"


def story(fate: PromptFate) -> list[str]:
    """One prompt at one scheduler, run by run."""
    num = sum(run.num for run in fate.runs)
    ordered = ", for another scheduler" if fate.is_order else ""
    lines = [
        f"{fate.request_id} at {fate.scheduler}{ordered}, attempt {fate.attempt}: "
        f"{num:,} full pages of {fate.page_size} tokens"
    ]
    places = [_place(run) for run in fate.runs]
    width = max(map(len, places), default=0)
    lines += [f"  {place.ljust(width)}  {what(run.why)}" for place, run in zip(places, fate.runs, strict=True)]
    if fate.prefill and _num_computed(fate.runs):
        lines.append(f"  what was computed, {fate.prefill} has computed or found")
    return lines


def summary(fates: Iterable[PromptFate]) -> list[str]:
    """A line for each prompt, as those that decode it say."""
    return [f"  pages at {fate.scheduler}: {_sums(fate.runs)}" for fate in fates if not fate.is_order and fate.runs]


def _sums(runs: Sequence[PageRun]) -> str:
    sums: dict[str, int] = {}
    for run in runs:
        sums[run.why] = sums.get(run.why, 0) + run.num
    had = [f"{sums[why]:,} {text}" for why, text in _HAD.items() if why in sums]
    return ", ".join([*had, *(f"{num:,} {what(why)}" for why, num in sums.items() if why not in _HAD)])


def _place(run: PageRun) -> str:
    last = run.first + run.num - 1
    return f"page {run.first:,}" if run.num == 1 else f"pages {run.first:,} to {last:,}"


def _num_computed(runs: Iterable[PageRun]) -> int:
    return sum(run.num for run in runs if run.why not in _HAD)
