"""One gateway's calls: those under way, the last thousand that ended, and which of them get a line in its log. Pure.

JobEndpoint --begin--> CallLog --read, prepared--> sample by sample: opened, ended --end--> kept, and perhaps a line
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodes.gateway.outputs import Generation
from nodes.gateway.records.open_calls import NONE
from nodes.gateway.records.request_log import Chooser
from nodes.gateway.request_names import RequestNames
from nodes.protocol.records import (
    MAX_CALLS,
    MAX_SAMPLES,
    NOT_YET,
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
    """One call under way; times on the service's clock. `names` are told again once the body has been read."""

    __slots__ = ("_samples", "arrived_at", "at", "cached_tokens", "names", "num_samples", "open_ids", "output_tokens",
                 "prepared_at", "prompt_tokens", "read_at", "slot", "template_s", "tokenize_s", "totals")  # fmt: skip

    def __init__(self, names: RequestNames, arrived_at: float, at: float) -> None:
        self.names = names
        self.arrived_at = arrived_at
        self.at = at
        self.read_at: float | None = None
        self.prepared_at: float | None = None
        self.tokenize_s = self.template_s = 0.0
        self.num_samples = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        # Of its requests that run: ids, with whether the tokens of its prompt count. Samples of a prompt share it.
        self.open_ids: dict[str, bool] = {}
        self.slot = NONE
        """Where it is in the file of open calls."""
        self.totals = CallRecord(names.ours)
        self._samples: list[SampleRecord] = []

    def read(self, now: float, names: RequestNames) -> None:
        self.read_at, self.names = now, names

    def prepared(self, now: float, tokenize_s: float, template_s: float = 0.0) -> None:
        """A tokenizer answered; of a call with many inputs, the last one counts."""
        self.prepared_at = now
        self.tokenize_s += tokenize_s
        self.template_s += template_s

    def opened(self, generation: Generation) -> None:
        for index, request_id in enumerate(generation.request_ids):
            self.open_ids[request_id] = index % generation.samples_per_prompt == 0
        self.num_samples += len(generation.request_ids)

    def ended(self, request_id: str, sample: SampleRecord | None) -> None:
        """A sample is over: counted, and kept if it is among the last ones of its call. None: nobody knows how."""
        counts_prompt = self.open_ids.pop(request_id, True)
        if sample is None:
            return
        self.totals = _added(self.totals, sample, counts_prompt=counts_prompt)
        self._samples.append(sample)
        if len(self._samples) > MAX_SAMPLES:
            # They end in the order of time: the first one took the least.
            del self._samples[0]

    def record(self, gateway: str, host: str, open_samples: Iterable[SampleRecord] = ()) -> CallRecord:
        """What there is, with those samples that still run."""
        totals, samples = self.totals, list(self._samples)
        for sample in open_samples:
            totals = _added(totals, sample, counts_prompt=self.open_ids.get(sample.request_id, True))
            samples.append(sample)
        # Those of the moment: the body may have named the call after it had begun.
        names = self.names
        samples = samples[-MAX_SAMPLES:]
        return msgspec.structs.replace(
            totals,
            request_id=names.ours,
            gateway=gateway,
            host=host,
            at=self.at,
            clock_s=round(self.arrived_at, 4),
            route=names.path,
            client_id=names.client,
            traceparent=names.traceparent,
            key=names.key,
            read_s=self._since(self.read_at),
            prepared_s=self._since(self.prepared_at),
            tokenize_s=self.tokenize_s,
            template_s=self.template_s,
            num_samples=self.num_samples,
            samples=sorted(samples, key=lambda sample: _number(sample.request_id)),
        )

    def _since(self, at: float | None) -> float:
        return NOT_YET if at is None else since(self.arrived_at, at)


def _number(request_id: str) -> int:
    number = request_id.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _added(to: CallRecord, sample: SampleRecord, *, counts_prompt: bool) -> CallRecord:
    """The numbers of a call with those of one more sample."""
    shown: dict[str, float] = {}
    if sample.first_token_s >= to.first_token_s and sample.attempts:
        # Those of the sample that had to wait longest, which is why the call took as long as it did.
        shown = {
            name: sum(getattr(attempt, name) for attempt in sample.attempts)
            for name in ("queue_s", "grant_s", "prefill_s", "transfer_s")
        }
    longest = max((stall.took_s for stall in sample.stalls), default=0.0)
    return msgspec.structs.replace(
        to,
        **shown,
        first_token_s=max(to.first_token_s, sample.first_token_s),
        stall_s=max(to.stall_s, longest),
        prompt_tokens=to.prompt_tokens + sample.prompt_tokens * counts_prompt,
        cached_tokens=to.cached_tokens + sample.cached_tokens * counts_prompt,
        output_tokens=to.output_tokens + sample.output_tokens,
        attempts=max(to.attempts, 1 + max((attempt.attempt for attempt in sample.attempts), default=-1)),
        finish=",".join(sorted({*to.finish.split(","), sample.finish} - {""})),
    )


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
        track = self._under_way[names.ours] = CallTrack(names, now, at)
        return track

    def opened(self, track: CallTrack) -> CallRecord:
        """What is known of a call whose body was read."""
        return track.record(self._gateway, self._host)

    @property
    def newest(self) -> CallRecord:
        """The call that ended last; there is one."""
        return self._kept[-1]

    def died(self, actor_id: str, epoch: int, reason: str, now: float) -> None:
        """A supervisor says so."""
        self._deaths.append((now, actor_id, epoch, reason[:_MAX_REASON_CHARS]))

    def end(self, track: CallTrack, status: int, code: str, now: float) -> bytes | None:
        """The call was answered with this HTTP status, and with this error if any. A line if it is to be written."""
        self._under_way.pop(track.names.ours, None)
        # Also of those that are not kept any more: whoever follows counts from it what was missed.
        self.num_ended += 1
        record = msgspec.structs.replace(
            self._record(track), status=status, code=code, total_s=since(track.arrived_at, now)
        )
        self._kept.append(record)
        # Chosen after it was kept: a call without a line can still be looked at, as long as this gateway lives.
        share = self._chooser.share(record, now)
        if not share:
            return None
        return msgspec.json.encode(msgspec.structs.replace(record, sampled=share)) + b"\n"

    def _record(self, track: CallTrack, samples: Iterable[SampleRecord] = ()) -> CallRecord:
        record = track.record(self._gateway, self._host, samples)
        if not self._deaths or self._deaths[-1][0] < track.arrived_at:
            # Nearly all calls: nobody has died since they came.
            return record
        heard = [
            DeathRecord(actor=actor, at_s=since(track.arrived_at, at), reason=reason)
            for at, actor, _, reason in self._deaths
            if at >= track.arrived_at
        ]
        return msgspec.structs.replace(record, deaths=heard[-_MAX_DEATHS_OF_CALL:])

    def find(
        self, query: FindCalls, now: float, open_sample: Callable[[str], SampleRecord | None], *, epoch: int
    ) -> CallsFound:
        """The calls that are meant, under way or kept."""
        me = f"{self._gateway}.{epoch}"
        if query.follows:
            # One that came since, in place of a dead one perhaps, is told from its first call on.
            num_new = self.num_ended - query.after.get(me, 0 if query.after else self.num_ended)
            found = list(self._kept)[len(self._kept) - min(num_new, len(self._kept)) :]
        elif query.name:
            found = [one for one in self._kept if is_meant(one.request_id, one.client_id, one.traceparent, query.name)]
            names = ((track, track.names) for track in self._under_way.values())
            meant = [track for track, its in names if is_meant(its.ours, its.client, its.traceparent, query.name)]
            found += [self._running(track, now, open_sample) for track in meant[:MAX_CALLS]]
        elif query.running:
            # The oldest: those are the ones that somebody waits for.
            oldest = list(self._under_way.values())[: query.running]
            found = [self._running(track, now, open_sample) for track in oldest]
        elif query.slowest:
            # Of those under way the oldest have taken longest, so no more of them can be among the slowest.
            oldest = list(self._under_way.values())[: query.slowest]
            running = [self._running(track, now, open_sample) for track in oldest]
            found = sorted([*self._kept, *running], key=lambda call: call.total_s)[-query.slowest :]
        else:
            found = list(self._kept)[max(0, len(self._kept) - query.last) :]
        num = len(self._under_way) if query.running else len(found)
        deaths = [
            HeardDeath(actor=actor, epoch=its, ago_s=since(at, now), reason=reason)
            for at, actor, its, reason in self._deaths
            if now - at < query.deaths_s
        ]
        return CallsFound(calls=found[-MAX_CALLS:], num=num, ended={me: self.num_ended}, deaths=deaths)

    def _running(self, track: CallTrack, now: float, open_sample: Callable[[str], SampleRecord | None]) -> CallRecord:
        # Of a call with thousands of inputs those that began first, which are the ones that take long.
        ids = list(track.open_ids)[:MAX_SAMPLES]
        samples = [sample for one in ids if (sample := open_sample(one)) is not None]
        return msgspec.structs.replace(self._record(track, samples), total_s=since(track.arrived_at, now))
