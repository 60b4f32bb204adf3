"""Where the time of a call went: spans that follow one another from its arrival to its end, without gaps. Pure.

    body | tokenizer's way | template | tokenize | gateway | queue | grant | prefill | transfer | ways | output
    | retry … | answer

`ways` are what none of the stages accounts for: frames between processes, and turns of their loops. Schedulers report
durations by their own clocks and not when these began, so their stages are put in order between two moments of the
gateway's clock, and what is left is one span behind them.
"""

from typing import Final, NamedTuple

from nodes.protocol.records import STALL_S, TOLD_S, AttemptRecord, CallRecord, SampleRecord

WAYS: Final = "ways"


class Span(NamedTuple):
    """`name` took from `begin_s` to `end_s`, in seconds from the call's arrival; `note` says where or why."""

    name: str
    begin_s: float
    end_s: float
    note: str = ""

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


class _Tiles:
    """Adds spans end to end: none that takes nothing, goes back in time, or goes beyond the end of the call."""

    def __init__(self, total_s: float) -> None:
        self.spans: list[Span] = []
        self._total_s = total_s
        self.at_s = 0.0

    def until(self, name: str, end_s: float, note: str = "") -> None:
        end_s = min(end_s, self._total_s)
        if end_s > self.at_s:
            self.spans.append(Span(name, self.at_s, end_s, note))
            self.at_s = end_s

    def lasting(self, name: str, took_s: float, limit_s: float, note: str = "") -> None:
        """A duration that another clock has measured; it cannot go beyond what this one says."""
        self.until(name, min(self.at_s + took_s, limit_s), note)


def sample_spans(call: CallRecord, sample: SampleRecord | None) -> list[Span]:
    """The spans of a call with one of its samples. They tile the time from 0 to `call.total_s`."""
    tiles = _Tiles(call.total_s)
    tiles.until("body", call.read_s)
    if call.prepared_s >= 0:
        tiles.until("tokenizer's way", max(tiles.at_s, call.prepared_s - call.tokenize_s))
        tiles.lasting("template", call.template_s, call.prepared_s)
        tiles.until("tokenize", call.prepared_s)
    # What the time up to the next submission is: the gateway's own, or that of finding another place.
    between, why = "gateway", ""
    if sample is not None:
        for attempt in sample.attempts:
            tiles.until(between, attempt.submitted_s, why)
            _add_attempt(tiles, attempt, sample, call.total_s)
            if attempt.failure:
                between, why = "retry", f"after {attempt.failure}"
        tiles.until(between, sample.ended_s, why)
        if sample.ended_s >= 0:
            # It waits for other samples, or for a client that reads slowly.
            between = "answer"
    tiles.until(_last_stage(call) if between == "gateway" else between, call.total_s, why if between == "retry" else "")
    return tiles.spans


def _last_stage(call: CallRecord) -> str:
    """What a call without an end of its sample is in, or was in when it ended."""
    if call.read_s < 0:
        return "body"
    return "tokenizer" if call.prepared_s < 0 else "gateway"


def _add_attempt(tiles: _Tiles, attempt: AttemptRecord, sample: SampleRecord, now_s: float) -> None:
    where = attempt.scheduler
    end_s = attempt.ended_s if attempt.ended_s >= 0 else now_s
    if attempt.first_s < 0:
        what = "waiting" if attempt.accepted_s >= 0 else "submit"
        tiles.until("submit", attempt.accepted_s, where)
        tiles.until(what, end_s, where)
        return
    stages_s = attempt.queue_s + attempt.grant_s + attempt.prefill_s + attempt.transfer_s
    # The answer may come after the first output, or late for reasons of its own: stages have their time first.
    tiles.until("submit", min(attempt.accepted_s, attempt.first_s - stages_s), where)
    prefill = attempt.prefill or where
    tiles.lasting("queue", attempt.queue_s, attempt.first_s, where)
    tiles.lasting("grant", attempt.grant_s, attempt.first_s, where)
    tiles.lasting("prefill", attempt.prefill_s, attempt.first_s, prefill)
    tiles.lasting("transfer", attempt.transfer_s, attempt.first_s, f"{prefill} to {where}")
    tiles.until(WAYS, attempt.first_s)
    for stall in sample.stalls:
        begin_s = stall.ended_s - stall.took_s
        # One that begins with the first token begins before it in the fifth digit: moments are told to a tenth of a ms.
        if tiles.at_s <= begin_s + TOLD_S and stall.ended_s <= end_s:
            tiles.until("output", begin_s, where)
            tiles.until("stall", stall.ended_s, f"before token {stall.position}")
    if attempt.ended_s >= 0 and not attempt.failure:
        # Its end may be lost and told again, long after the last token.
        tiles.until("output", sample.last_token_s, where)
        tiles.until("finish", end_s, where)
    elif attempt.ended_s < 0 and end_s - sample.last_token_s > STALL_S:
        # The gateway notes a pause when it ends, and whoever asks now asks because of it.
        tiles.until("output", sample.last_token_s, where)
        tiles.until("stall", end_s, f"{sample.output_tokens} tokens came")
    else:
        tiles.until("output", end_s, where)
