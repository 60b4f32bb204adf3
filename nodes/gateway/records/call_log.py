"""One gateway's calls: those under way, the last thousand that ended, and which of them get a line in its log. Pure.

JobEndpoint --begin--> CallLog --read, prepared--> sample by sample: opened, ended --end--> kept, and perhaps a line
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodes.gateway.records.open_calls import NONE
from nodes.gateway.records.request_log import Chooser
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.outputs import Generation
from nodes.gateway.requests.sample_log import SampleSoFar
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
_NOTHING: Final = CallRecord("")
"""The numbers of no sample."""


class CallTrack:
    """One call, under way or ended; times on the service's clock. `names` are told again once the body has been read.

    It becomes a record when somebody looks at it. Made at the end of each call, records were 5 % of a gateway's time.
    """

    __slots__ = ("_folded", "_samples", "arrived_at", "at", "code", "deaths", "names", "num_samples", "open_ids",
                 "prepared_at", "read_at", "slot", "status", "template_s", "tokenize_s", "total_s")  # fmt: skip

    def __init__(self, names: RequestNames, arrived_at: float, at: float) -> None:
        self.names = names
        self.arrived_at = arrived_at
        self.at = at
        self.read_at: float | None = None
        self.prepared_at: float | None = None
        self.tokenize_s = self.template_s = 0.0
        self.num_samples = 0
        # Of its requests that run: ids, with whether the tokens of its prompt count. Samples of a prompt share it.
        self.open_ids: dict[str, bool] = {}
        self.slot = NONE
        """Where it is in the file of open calls."""
        # The last samples that ended, with whether their prompts count, and the numbers of those before them.
        self._samples: list[tuple[SampleSoFar, bool]] = []
        self._folded = _NOTHING
        self.status = 0
        self.code = ""
        self.total_s = NOT_YET
        self.deaths: list[DeathRecord] = []

    @property
    def request_id(self) -> str:
        return self.names.ours

    @property
    def first_token_s(self) -> float:
        """That of the sample that had it last."""
        return max(self._folded.first_token_s, *(one.log.first_token_s for one, _ in self._samples), NOT_YET)

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

    def ended(self, request_id: str, sample: SampleSoFar | None) -> None:
        """A sample is over: counted, and kept if it is among the last ones of its call. None: nobody knows how."""
        counts_prompt = self.open_ids.pop(request_id, True)
        if sample is None:
            return
        self._samples.append((sample, counts_prompt))
        if len(self._samples) > MAX_SAMPLES:
            # They end in the order of time: the first one took the least.
            first, counts_prompt = self._samples.pop(0)
            self._folded = _added(self._folded, first.record(), counts_prompt=counts_prompt)

    def record(self, gateway: str, host: str, open_samples: Iterable[SampleSoFar] = ()) -> CallRecord:
        """What there is, with those samples that still run."""
        running = [(one, self.open_ids.get(one.request_id, True)) for one in open_samples]
        totals, samples = self._folded, list[SampleRecord]()
        for one, counts_prompt in [*self._samples, *running]:
            samples.append(sample := one.record())
            totals = _added(totals, sample, counts_prompt=counts_prompt)
        # Those of the moment: the body may have named the call after it had begun.
        names = self.names
        if len(samples) > 1:
            samples = sorted(samples[-MAX_SAMPLES:], key=lambda sample: _number(sample.request_id))
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
            status=self.status,
            code=self.code,
            total_s=self.total_s,
            read_s=self._since(self.read_at),
            prepared_s=self._since(self.prepared_at),
            tokenize_s=self.tokenize_s,
            template_s=self.template_s,
            num_samples=self.num_samples,
            samples=samples,
            deaths=self.deaths,
        )

    def _since(self, at: float | None) -> float:
        return NOT_YET if at is None else since(self.arrived_at, at)


def _is_meant(track: CallTrack, name: str) -> bool:
    its = track.names
    return is_meant(its.ours, its.client, its.traceparent, name)


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
        self._kept: deque[CallTrack] = deque(maxlen=NUM_KEPT)
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
        return self._record(self._kept[-1])

    def died(self, actor_id: str, epoch: int, reason: str, now: float) -> None:
        """A supervisor says so."""
        self._deaths.append((now, actor_id, epoch, reason[:_MAX_REASON_CHARS]))

    def end(self, track: CallTrack, status: int, code: str, now: float) -> bytes | None:
        """The call was answered with this HTTP status, and with this error if any. A line if it is to be written."""
        self._under_way.pop(track.names.ours, None)
        # Also of those that are not kept any more: whoever follows counts from it what was missed.
        self.num_ended += 1
        track.status, track.code, track.total_s = status, code, since(track.arrived_at, now)
        # Now, since those that come later are not of this call.
        track.deaths = self._heard_since(track.arrived_at)
        self._kept.append(track)
        # Chosen after it was kept: a call without a line can still be looked at, as long as this gateway lives.
        share = self._chooser.share(track, now)
        if not share:
            return None
        return msgspec.json.encode(msgspec.structs.replace(self._record(track), sampled=share)) + b"\n"

    def _record(self, track: CallTrack) -> CallRecord:
        return track.record(self._gateway, self._host)

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
        self, query: FindCalls, now: float, open_sample: Callable[[str], SampleSoFar | None], *, epoch: int
    ) -> CallsFound:
        """The calls that are meant, under way or kept."""
        me = f"{self._gateway}.{epoch}"
        kept, found = list(self._kept), list[CallTrack | CallRecord]()
        if query.follows:
            # One that came since, in place of a dead one perhaps, is told from its first call on.
            num_new = self.num_ended - query.after.get(me, 0 if query.after else self.num_ended)
            found += kept[len(kept) - min(num_new, len(kept)) :]
        elif query.name:
            meant = [track for track in self._under_way.values() if _is_meant(track, query.name)]
            found += [track for track in kept if _is_meant(track, query.name)]
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
        calls = [one if isinstance(one, CallRecord) else self._record(one) for one in found[-MAX_CALLS:]]
        deaths = [
            HeardDeath(actor=actor, epoch=its, ago_s=since(at, now), reason=reason)
            for at, actor, its, reason in self._deaths
            if now - at < query.deaths_s
        ]
        return CallsFound(calls=calls, num=num, ended={me: self.num_ended}, deaths=deaths)

    def _running(self, track: CallTrack, now: float, open_sample: Callable[[str], SampleSoFar | None]) -> CallRecord:
        # Of a call with thousands of inputs those that began first, which are the ones that take long.
        ids = list(track.open_ids)[:MAX_SAMPLES]
        samples = [sample for one in ids if (sample := open_sample(one)) is not None]
        record = track.record(self._gateway, self._host, samples)
        return msgspec.structs.replace(
            record, total_s=since(track.arrived_at, now), deaths=self._heard_since(track.arrived_at)
        )
