"""What a storm has shown, for each blow and in all: what was lost, differed or stood still, and how long. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from cli.chaos.answer import Answer, differences
from cli.chaos.blows import Blow
from cli.chaos.clients import Sent
from cli.output import printable, table_lines
from cli.protocol import ActorStatus
from mesh.membership.view import READY
from mesh.supervision.events import DRAINED
from nodes.numerics import is_same_bits

_MOST_EXAMPLES: Final = 5
"""Of what was lost or different: the first ones; a hundred more have the same cause, and -o json counts them."""
_ON_THE_WAY_S: Final = 0.5
"""So long after a blow there still comes what had been computed before it."""
_HEADER: Final = ("AT", "BLOW", "TARGET", "SETTLED", "REQUESTS", "LOST", "OTHER", "STALLS", "LONGEST GAP", "")


T = TypeVar("T")


@dataclass
class Fallen:
    """A blow that was dealt, `at_s` of `time.monotonic`.

    `has_landed`: whether there was somebody to strike; `note`: what became of it. `settled_s`: how long after `at_s`
    all actors were ready, None if they were not yet. `is_gateway`: connections break with the one that was struck.
    """

    blow: Blow
    at_s: float
    has_landed: bool = False
    note: str = ""
    settled_s: float | None = None
    is_gateway: bool = False

    def may_break(self, began_s: float, ended_s: float) -> bool:
        """Whether a connection of that time may have ended with a gateway that this has struck."""
        if not (self.is_gateway and self.has_landed and self.at_s <= ended_s):
            return False
        return self.settled_s is None or began_s <= self.at_s + self.settled_s


@dataclass(frozen=True)
class Seen:
    """A whole storm. `no_promise`: why equal texts are not promised, empty if they are. `held`: what a mesh left alone
    still held for requests. `unsettled`: who was not ready in the end, and `deaths` by whom nobody has struck.
    """

    seconds: float
    began_s: float
    sent: Sequence[Sent]
    gaps_s: Sequence[tuple[float, float]]
    fallen: Sequence[Fallen]
    no_promise: str
    unsettled: str
    num_deaths: int
    unstruck: Sequence[str]
    held: Mapping[str, float]


class Counts(msgspec.Struct, frozen=True):
    """Requests and gaps of a time. `cut` were sent again, since their gateway had been struck, and count only as such;
    `different` are answers that were whole, or broken off by their client, and are not the known ones. `stalls` are
    gaps of `stall_s` or more.
    """

    sent: int
    whole: int
    cancelled: int
    slow: int
    cut: int
    lost: int
    different: int
    stalls: int
    longest_gap_s: float


NOTHING: Final = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0.0)


class BlowReport(msgspec.Struct, frozen=True):
    """One blow, in seconds from the storm's begin, and what counts for it: what ended, and gaps that began, until the
    next one. `settled_s` counts from the blow, so of an actor that was stopped it includes that time.
    """

    at_s: float
    kind: str
    target: str
    lasts_s: float
    landed: bool
    note: str
    settled_s: float | None
    counts: Counts


class Report(msgspec.Struct, frozen=True):
    """A storm: `total` has also what came before its first blow. `failed`: something was lost, differed although equal
    texts are promised, or was not ready again.
    """

    seconds: float
    failed: bool
    no_promise: str
    unsettled: str
    stall_s: float
    total: Counts
    blows: list[BlowReport]
    examples: list[str]
    num_deaths: int
    unstruck: list[str]
    held: dict[str, float]


def summarize(seen: Seen, stall_s: float) -> Report:
    """`stall_s`: from which length on a gap counts as a stall."""
    landed = sorted((one for one in seen.fallen if one.has_landed), key=lambda one: one.at_s)
    times = [one.at_s for one in landed]
    ended = [one for one in seen.sent if one.ended_s]

    def blow_of_request(one: Sent) -> int:
        # An answer breaks when it ends, so the last blow before that has done it.
        return bisect_right(times, one.ended_s) - 1

    def blow_of_gap(gap: tuple[float, float]) -> int:
        # The first one within the gap, or just before it, has begun it; else the last one before it.
        before = bisect_right(times, gap[0] - _ON_THE_WAY_S)
        return before if before < len(times) and times[before] <= gap[1] else before - 1

    by_blow = _grouped(ended, blow_of_request)
    gaps_by_blow = _grouped(seen.gaps_s, blow_of_gap)
    counts = {
        id(one): _counts(by_blow.get(number, []), gaps_by_blow.get(number, []), stall_s)
        for number, one in enumerate(landed)
    }
    total = _counts(ended, seen.gaps_s, stall_s)
    bad = [text for one in ended for text in (one.lost, one.different) if text]
    return Report(
        seconds=round(seen.seconds, 1),
        failed=bool(total.lost or (total.different and not seen.no_promise) or seen.unsettled),
        no_promise=seen.no_promise,
        unsettled=seen.unsettled,
        stall_s=stall_s,
        total=total,
        blows=[told(one, seen.began_s, counts.get(id(one), NOTHING)) for one in seen.fallen],
        examples=bad[:_MOST_EXAMPLES],
        num_deaths=seen.num_deaths,
        unstruck=[*seen.unstruck],
        held=dict(seen.held),
    )


def why_no_promise(numerics: Mapping[str, str], one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """Why a mesh does not promise the same text to the same request; empty if it does.

    `numerics` of its schedulers, as far as they are known; `one` and `other`: answers to the same requests, taken when
    nobody was struck.
    """
    if len({*numerics.values()}) > 1:
        return f"its groups compute with different numerics: {', '.join(sorted({*numerics.values()}))}"
    if any(not is_same_bits(text) for text in numerics.values()):
        return f"with its numerics results vary with the batch: {', '.join(sorted({*numerics.values()}))}"
    found = differences(one, other)
    return f"answers differed before anybody was struck: {found[0]}" if found else ""


def unsettled(actors: Sequence[ActorStatus], later_than: Mapping[str, int]) -> str:
    """Who of this host's actors is not ready, or not yet in an epoch later than it was killed in; empty if all are.

    Those that an operator has drained stay away.
    """
    for actor in actors:
        if actor.supervised and actor.state not in (READY, DRAINED):
            return f"{actor.actor_id} is {actor.state}" + (f" ({actor.last_reason})" if actor.last_reason else "")
        if actor.epoch <= later_than.get(actor.actor_id, -1):
            return f"{actor.actor_id} has not been started again"
    return ""


def deaths(before: Sequence[ActorStatus], after: Sequence[ActorStatus], struck: Sequence[str]) -> tuple[int, list[str]]:
    """How many deaths there were in between, and of whom although they were never struck, with the last reason."""
    # By the supervisor's own count: an actor that died twice between two looks shows one new epoch.
    known = {actor.actor_id: actor.num_deaths for actor in before}
    more = {actor.actor_id: actor.num_deaths - known.get(actor.actor_id, 0) for actor in after}
    reasons = {actor.actor_id: actor.last_reason for actor in after}
    unstruck = [f"{id_}: {num} times, last: {reasons[id_]}" for id_, num in more.items() if num and id_ not in struck]
    return sum(more.values()), unstruck


def lines(report: Report) -> list[str]:
    """The report for people."""
    total = report.total
    text = [
        f"{total.sent:,} requests in {report.seconds:.0f} s: {total.whole:,} whole ({total.slow:,} by slow readers), "
        f"{total.cancelled:,} cancelled by their clients"
        + (f", {total.cut:,} cut or refused by struck gateways and sent again" if total.cut else ""),
        f"lost: {total.lost:,}; different: {total.different:,}"
        + (f" (not promised to be equal: {report.no_promise})" if report.no_promise else ""),
        f"stalled for {report.stall_s:g} s or more: {total.stalls:,}; longest gap {total.longest_gap_s:.1f} s",
        _deaths_line(report),
    ]
    text += [f"died without being struck: {who}" for who in report.unstruck]
    text += [f"not settled: {report.unsettled}"] if report.unsettled else []
    text += [f"still held for requests: {name} = {value:g}" for name, value in report.held.items()]
    text += [f"example: {printable(one)}" for one in report.examples]
    rows, _ = table_lines(_HEADER, [_row(one) for one in report.blows])
    return [*rows, "", *text]


def line(blow: BlowReport) -> str:
    """One blow in a line, for who waits for the end of the storm."""
    return f"{blow.at_s:7.1f} s  {blow.kind:<8} {blow.target:<22} {_settled(blow)}" + (
        f"; {blow.note}" if blow.note else ""
    )


def _deaths_line(report: Report) -> str:
    times = sorted(one.settled_s for one in report.blows if one.landed and one.settled_s is not None)
    settled = f"; settled after {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s at most" if times else ""
    num_landed = sum(one.landed for one in report.blows)
    return f"{num_landed} of {len(report.blows)} blows landed, {report.num_deaths} deaths{settled}"


def _row(one: BlowReport) -> list[str]:
    counts = one.counts
    numbers = [str(value or "-") for value in (counts.sent, counts.lost, counts.different, counts.stalls)]
    kind = one.kind if not one.lasts_s else f"{one.kind} {one.lasts_s:.1f} s"
    gap = f"{counts.longest_gap_s:.1f} s" if counts.longest_gap_s else "-"
    return [f"{one.at_s:.1f} s", kind, one.target, _settled(one), *numbers, gap, one.note]


def _settled(one: BlowReport) -> str:
    if not one.landed:
        return "missed"
    return "never" if one.settled_s is None else f"{one.settled_s:.1f} s"


def told(one: Fallen, began_s: float, counts: Counts = NOTHING) -> BlowReport:
    """A blow of a storm that began then."""
    blow = one.blow
    at_s, settled_s = round(one.at_s - began_s, 2), None if one.settled_s is None else round(one.settled_s, 2)
    return BlowReport(at_s, blow.kind, blow.target, blow.lasts_s, one.has_landed, one.note, settled_s, counts)


def _counts(sent: Sequence[Sent], gaps_s: Sequence[tuple[float, float]], stall_s: float) -> Counts:
    # What was cut is asked for again, as a request of its own: counted twice it would hide that nothing was lost.
    whole = [one for one in sent if not (one.lost or one.is_cut or one.was_cancelled)]
    lengths_s = [ended_s - began_s for began_s, ended_s in gaps_s]
    return Counts(
        sent=len(sent) - sum(one.is_cut for one in sent),
        whole=len(whole),
        cancelled=sum(one.was_cancelled for one in sent),
        slow=sum(one.request.pause_s > 0 for one in whole),
        cut=sum(one.is_cut for one in sent),
        lost=sum(bool(one.lost) for one in sent),
        different=sum(bool(one.different) for one in sent),
        stalls=sum(length_s >= stall_s for length_s in lengths_s),
        longest_gap_s=round(max(lengths_s, default=0.0), 2),
    )


def _grouped(values: Sequence[T], number_of: Callable[[T], int]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for value in values:
        found.setdefault(number_of(value), []).append(value)
    return found
