"""One gateway's calls: those under way, the last thousand that ended, and which of them get a line in its log. Pure.

JobEndpoint --begin--> CallLog --read, prepared--> sample by sample: opened, ended --end--> kept, and perhaps a line
"""

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Final

import msgspec

from nodes.gateway.records.open_calls import NONE
from nodes.gateway.records.request_log import Chooser
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.outputs import Generation
from nodes.protocol.records import (
    MAX_CALLS,
    MAX_SAMPLES,
    CallRecord,
    CallsFound,
    DeathRecord,
    FindCalls,
    HeardDeath,
    SampleRecord,
    is_meant,
    since,
)

NUM_KEPT: Final = 1000
"""Of about 1.5 KB, up to 10 KB with eight samples that were put back often: some MB at a gateway."""
_MAX_DEATHS: Final = 64
"""What a mesh that is killed once a second brings in a minute, which is more than most calls take."""
_MAX_DEATHS_OF_CALL: Final = 8
"""The last ones: what they have in common, more of them would not show either."""
_MAX_REASON_CHARS: Final = 200
"""A reason may quote the last lines of a log (400 characters), which `meshctl ps` shows whole."""


class CallTrack:
    """A call under way, with its record, in which are the samples that have ended; times on the service's clock."""

    __slots__ = ("arrived_at", "open_ids", "slot", "told")

    def __init__(self, told: CallRecord, arrived_at: float) -> None:
        self.told = told
        self.arrived_at = arrived_at
        # Of its requests that run: ids, with whether the tokens of its prompt count. Samples of a prompt share it.
        self.open_ids: dict[str, bool] = {}
        self.slot = NONE
        """Where it is in the file of open calls."""

    def read(self, now: float, names: RequestNames) -> None:
        """The body was read, which may have named the call."""
        self.told.read_s, self.told.client_id = since(self.arrived_at, now), names.client

    def prepared(self, now: float, tokenize_s: float, template_s: float = 0.0) -> None:
        """A tokenizer answered; of a call with many inputs, the last one counts."""
        self.told.prepared_s = since(self.arrived_at, now)
        self.told.tokenize_s += tokenize_s
        self.told.template_s += template_s

    def opened(self, generation: Generation) -> None:
        for index, request_id in enumerate(generation.request_ids):
            self.open_ids[request_id] = index % generation.samples_per_prompt == 0
        self.told.num_samples += len(generation.request_ids)

    def ended(self, request_id: str, sample: SampleRecord | None) -> None:
        """A sample is over: counted, and kept if it is among the last ones of its call. None: nobody knows how."""
        counts_prompt = self.open_ids.pop(request_id, True)
        if sample is not None:
            _add(self.told, sample, counts_prompt=counts_prompt)

    def running(self, now: float, open_sample: Callable[[str], SampleRecord | None]) -> CallRecord:
        """What there is, with samples that still run."""
        told = copy(self.told)
        told.samples, told.total_s = list(told.samples), since(self.arrived_at, now)
        # Of a call with thousands of inputs those that began first, which are the ones that take long.
        for request_id, counts_prompt in list(self.open_ids.items())[:MAX_SAMPLES]:
            if (sample := open_sample(request_id)) is not None:
                _add(told, sample, counts_prompt=counts_prompt)
        told.samples.sort(key=_number)
        return told


def _number(sample: SampleRecord) -> int:
    number = sample.request_id.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _add(to: CallRecord, sample: SampleRecord, *, counts_prompt: bool) -> None:
    """Write a sample into the record of its call."""
    attempts = sample.attempts
    if attempts:
        to.attempts = max(to.attempts, 1 + attempts[-1].attempt)
        if sample.first_token_s >= to.first_token_s:
            # Those of the sample that had to wait longest, which is why the call took as long as it did.
            to.queue_s = sum([one.queue_s for one in attempts])
            to.grant_s = sum([one.grant_s for one in attempts])
            to.prefill_s = sum([one.prefill_s for one in attempts])
            to.transfer_s = sum([one.transfer_s for one in attempts])
    to.first_token_s = max(to.first_token_s, sample.first_token_s)
    to.stall_s = max(to.stall_s, *(stall.took_s for stall in sample.stalls), 0.0)
    if counts_prompt:
        to.prompt_tokens += sample.prompt_tokens
        to.cached_tokens += sample.cached_tokens
    to.output_tokens += sample.output_tokens
    if sample.finish not in to.finish.split(","):
        to.finish = ",".join(sorted({*to.finish.split(","), sample.finish} - {""}))
    to.samples.append(sample)
    if len(to.samples) > MAX_SAMPLES:
        # They end in the order of time: the first one took the least.
        del to.samples[0]


class CallLog:
    """All calls of one gateway; `chooser` says which get lines."""

    def __init__(self, gateway: str, host: str, chooser: Chooser) -> None:
        self._gateway = gateway
        self._host = host
        self._chooser = chooser
        self._under_way: dict[str, CallTrack] = {}
        self._kept: deque[CallRecord] = deque(maxlen=NUM_KEPT)
        self._deaths: deque[tuple[float, str, int, str]] = deque(maxlen=_MAX_DEATHS)
        self.num_ended = 0

    def begin(self, names: RequestNames, now: float, at: float) -> CallTrack:
        """A call arrived; `at` is Unix time."""
        told = CallRecord(
            request_id=names.ours,
            gateway=self._gateway,
            at=at,
            clock_s=round(now, 4),
            host=self._host,
            route=names.path,
            client_id=names.client,
            traceparent=names.traceparent,
            key=names.key,
        )
        track = self._under_way[names.ours] = CallTrack(told, now)
        return track

    @property
    def newest(self) -> CallRecord:
        """The call that ended last; there is one."""
        return self._kept[-1]

    def died(self, actor_id: str, epoch: int, reason: str, now: float) -> None:
        """A supervisor says so."""
        self._deaths.append((now, actor_id, epoch, reason[:_MAX_REASON_CHARS]))

    def end(self, track: CallTrack, status: int, code: str, now: float) -> bytes | None:
        """The call was answered with this HTTP status, and with this error if any. A line if it is to be written."""
        told = track.told
        self._under_way.pop(told.request_id, None)
        # Also of those that are not kept any more: whoever follows counts from it what was missed.
        self.num_ended += 1
        told.status, told.code, told.total_s = status, code, since(track.arrived_at, now)
        told.samples.sort(key=_number)
        # Now, since those that come later are not of this call.
        told.deaths = self._heard_since(track.arrived_at)
        self._kept.append(told)
        # Chosen after it was kept: a call without a line can still be looked at, as long as this gateway lives.
        share = self._chooser.share(told, now)
        return msgspec.json.encode(msgspec.structs.replace(told, sampled=share)) + b"\n" if share else None

    def _heard_since(self, arrived_at: float) -> list[DeathRecord]:
        if not self._deaths or self._deaths[-1][0] < arrived_at:
            # Nearly all calls: nobody has died since they came.
            return []
        heard = [
            DeathRecord(actor=actor, at_s=since(arrived_at, at), reason=reason)
            for at, actor, _, reason in self._deaths
            if at >= arrived_at
        ]
        return heard[-_MAX_DEATHS_OF_CALL:]

    def find(
        self, query: FindCalls, now: float, open_sample: Callable[[str], SampleRecord | None], *, epoch: int
    ) -> CallsFound:
        """The calls that are meant, under way or kept."""
        me = f"{self._gateway}.{epoch}"
        kept, found = list(self._kept), list[CallRecord]()
        if query.follows:
            # One that came since, in place of a dead one perhaps, is told from its first call on.
            num_new = self.num_ended - query.after.get(me, 0 if query.after else self.num_ended)
            found += kept[len(kept) - min(num_new, len(kept)) :]
        elif query.name:
            meant = [track for track in self._under_way.values() if _is_meant(track.told, query.name)]
            found += [told for told in kept if _is_meant(told, query.name)]
            found += [self._running(track, now, open_sample) for track in meant[:MAX_CALLS]]
        elif query.running:
            # The oldest: those are the ones that somebody waits for.
            oldest = list(self._under_way.values())[: query.running]
            found += [self._running(track, now, open_sample) for track in oldest]
        elif query.slowest:
            # Of those under way the oldest have taken longest, so no more of them can be among the slowest.
            oldest = list(self._under_way.values())[: query.slowest]
            running = [self._running(track, now, open_sample) for track in oldest]
            found = sorted([*kept, *running], key=lambda call: call.total_s)[-query.slowest :]
        else:
            found += kept[max(0, len(kept) - query.last) :]
        num = len(self._under_way) if query.running else len(found)
        deaths = [
            HeardDeath(actor=actor, epoch=its, ago_s=since(at, now), reason=reason)
            for at, actor, its, reason in self._deaths
            if now - at < query.deaths_s
        ]
        return CallsFound(calls=found[-MAX_CALLS:], num=num, ended={me: self.num_ended}, deaths=deaths)

    def _running(self, track: CallTrack, now: float, open_sample: Callable[[str], SampleRecord | None]) -> CallRecord:
        told = track.running(now, open_sample)
        told.deaths = self._heard_since(track.arrived_at)
        return told


def _is_meant(told: CallRecord, name: str) -> bool:
    return is_meant(told.request_id, told.client_id, told.traceparent, name)
