"""What a gateway remembers of a call: when each of its stages began and ended, attempt by attempt.

    supervisor, gateway -> gateway    FindCalls -> CallsFound
    meshctl -> supervisor             the same, of one host or of all

A record is also a line of the gateway's request log, as JSON. All times are seconds on one clock, the gateway's own,
from the call's arrival on; a time of -1 has not come (yet). What schedulers report are durations, each measured on the
host that it ran on, so no two clocks are ever compared. There is no prompt, no text and no address in a record.

Records of attempts and calls are written by their gateway while those run; nothing changes once they have ended.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from mesh.wire.message import Message, Part

NOT_YET: Final = -1.0
STALL_S: Final = 0.25
"""Shorter pauses no reader notices; restarting a worker takes 0.3 s, which has to be among them."""
TOLD_S: Final = 1e-4
"""Moments are told to this: a loop's clock goes on once a turn, of which the quickest take as long."""
MAX_CALLS: Final = 100
"""Of one answer: some 100 KB, and more than anybody reads in a terminal."""
MAX_SAMPLES: Final = 8
"""Kept with their attempts in the record of a call, which may have 2,048; its numbers count all of them."""


class AttemptRecord(Struct, omit_defaults=True):
    """One submission of a sample to a scheduler. One that was refused has the number of the next one.

    `queue_s`, `grant_s`, `prefill_s`, `transfer_s` as in `nodes.request.Stages`. `failure` is the code of what ended
    it if the sample went on, or failed, after it; `why` the words for that.
    """

    attempt: int
    scheduler: str
    submitted_s: float
    prefill: str = ""
    detokenizer: str = ""
    epoch: int = 0
    accepted_s: float = NOT_YET
    first_s: float = NOT_YET
    ended_s: float = NOT_YET
    queue_s: float = 0.0
    grant_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    failure: str = ""
    why: str = ""


class StallRecord(Part, frozen=True):
    """A pause in the output of a sample that is long beside its pace: before which token, when it ended, how long."""

    position: int
    ended_s: float
    took_s: float


class SampleRecord(Part, frozen=True):
    """One sample, that is one request of the mesh. `finish` is its finish reason, `failure` the code of its failure;
    neither: its client left, or it runs.
    """

    request_id: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = NOT_YET
    last_token_s: float = NOT_YET
    ended_s: float = NOT_YET
    finish: str = ""
    failure: str = ""
    attempts: list[AttemptRecord] = []
    stalls: list[StallRecord] = []


class DeathRecord(Part, frozen=True):
    """An actor whose death the gateway heard of during the call, and what the supervisor said of it."""

    actor: str
    at_s: float
    reason: str


class CallRecord(Struct, omit_defaults=True):
    """One HTTP call with all of its samples.

    `at` is Unix time by the gateway's clock, for people; `clock_s` the time of its arrival by the clock that all
    processes of the gateway's `host` share. `read_s`: its body was read. `tokenize_s` is what tokenizers
    took, by their own clocks, `template_s` of it until chat templates were rendered; `prepared_s` when their answers
    were there. `first_token_s`, `queue_s` … are those of the sample that had its first token last; `stall_s` the
    longest pause in anybody's output. `attempts` is the largest number of any sample. `code` is that of the error that
    it was answered with. `sampled`: the line stands for so many calls. `samples` are those that ended last,
    `MAX_SAMPLES` at most, in the order of the answer.
    """

    request_id: str
    gateway: str = ""
    at: float = 0.0
    clock_s: float = 0.0
    host: str = ""
    route: str = ""
    client_id: str = ""
    traceparent: str = ""
    key: str = ""
    status: int = 0
    code: str = ""
    finish: str = ""
    total_s: float = NOT_YET
    read_s: float = NOT_YET
    prepared_s: float = NOT_YET
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    grant_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_token_s: float = NOT_YET
    stall_s: float = 0.0
    num_samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0
    sampled: int = 1
    samples: list[SampleRecord] = []
    deaths: list[DeathRecord] = []
    template_s: float = 0.0


class HeardDeath(Part, frozen=True):
    """An incarnation that a supervisor said is dead, how many seconds ago a gateway heard that, and the reason told."""

    actor: str
    epoch: int
    ago_s: float
    reason: str


class FindCalls(Message, frozen=True):
    """Ask for calls: those that `name` means (our id, that of a sample, `X-Request-Id`, traceparent or its trace id),
    or the `last` ones that ended, or the `slowest`, those that still run included, or of these alone as many as
    `running` says, the oldest ones; or of a gateway those that ended `after` the number that its last answer told.
    To a supervisor: of its host, or of the `whole_mesh`. To a gateway, also for the deaths that it heard of in the last
    `deaths_s` seconds.
    """

    name: str = ""
    last: Annotated[int, Meta(ge=0, le=MAX_CALLS)] = 0
    slowest: Annotated[int, Meta(ge=0, le=MAX_CALLS)] = 0
    after: dict[str, int] = {}
    follows: bool = False
    whole_mesh: bool = False
    deaths_s: float = 0.0
    running: Annotated[int, Meta(ge=0, le=MAX_CALLS)] = 0


class FindNotes(Message, frozen=True):
    """Ask a supervisor what the actors of its host, or of the `whole_mesh`, noted of the requests of these ids, also
    those that are dead. With their host's clock: `CallRecord.clock_s` is on that of the gateway's.
    """

    request_ids: Annotated[list[str], Meta(max_length=MAX_CALLS)]
    whole_mesh: bool = False


class NotePart(Part, frozen=True):
    """One note: when, by the clock of its host, and what, in words."""

    at: float
    request_id: str
    text: str


class StepPart(Part, frozen=True):
    """A step of a scheduler's, or of a worker's after it had lain there for `waited_s` (a scheduler's: -1). It ended
    `at`, after `took_s`, with so many rows and tokens; one that did not end (`took_s` -1) began `at`.
    """

    at: float
    number: int
    num_rows: int
    num_tokens: int
    took_s: float
    waited_s: float = NOT_YET


class ActorNotes(Part, frozen=True):
    """What one incarnation noted; `num_lost` older notes, of whatever requests, were written over. `steps` are its
    longest ones while its host had these requests. `arrived` is when each attempt came to it, by request id and
    attempt: submitted, ordered, or as a stream.
    """

    actor_id: str
    epoch: int
    host: str = ""
    notes: list[NotePart] = []
    steps: list[StepPart] = []
    arrived: list[tuple[str, int, float]] = []
    num_lost: int = 0


class NotesFound(Message, frozen=True):
    """Answer to `FindNotes`, without actors that noted nothing of them. `silent` hosts did not answer."""

    actors: list[ActorNotes]
    silent: list[str] = []


class CallsFound(Message, frozen=True):
    """Answer to `FindCalls`, `MAX_CALLS` at most, and how many there were. `ended` counts, by gateway with its epoch,
    the calls that have ended. `silent` are gateways and hosts that did not answer.
    """

    calls: list[CallRecord]
    num: int = 0
    ended: dict[str, int] = {}
    silent: list[str] = []
    deaths: list[HeardDeath] = []


def since(begin: float, at: float) -> float:
    """Seconds from `begin` to `at`, to `TOLD_S`."""
    return round(at - begin, 4)


def is_meant(ours: str, client: str, traceparent: str, name: str) -> bool:
    """Whether a call of these names goes by `name`, or one of its samples does."""
    if name in (ours, client, traceparent) or (traceparent and name == traceparent[3:35]):
        return True
    number = name.removeprefix(f"{ours}-")
    return number != name and number.isdigit()
