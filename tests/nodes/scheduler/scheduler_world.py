"""A small mesh around scheduler cores: workers, agents, one edge, and a wire that a test controls.

The next token is a hash of all tokens, read from the pages that the step names, so a wrong page, a page overwritten too
early or a lost chunk shows up as a wrong token. Messages lie on links, one per (sender, receiver), FIFO; `deliver`,
`drop` and `repeat` take the head of one, `settle` delivers everything and lets time run.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.layout import KVLayout
from kvstore.protocol import (
    AnnouncePages,
    CloseGrant,
    ListStoredPages,
    OpenGrants,
    PoolHandle,
    StoredPagesListed,
    TransferFailed,
    TransferNews,
)
from kvstore.transfer.session import CopyEnded
from mesh.address import Address
from mesh.runtime.effects import Answered, Ask, Asked, AskFailed, Publish, Refuse, Reply, Tell, Told
from nodes.asks import ASK_NAMES, RowEdits, asked
from nodes.asks.min_tokens import MinTokens
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.kv_agent import events as agent_events
from nodes.kv_agent.config import Bounds
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.pools.facts import Pool
from nodes.model_spec import resolve_model
from nodes.models.pooling import Pooling
from nodes.prompt_payloads import PromptPayloads
from nodes.protocol import (
    Adopt,
    Adopted,
    AttemptFailed,
    AttemptsSubmitted,
    CancelAttempts,
    Fence,
    Pooled,
    PromptRead,
    Resend,
    ResendFrom,
    RowError,
    StepResult,
    Submit,
    SubmitAttempts,
    TokenBatch,
)
from nodes.request import TOKENS, VECTORS, AttemptRef, RequestSpec, Sampling, StopRules
from nodes.roles import DETOKENIZER, KV_AGENT, NODE_CODEC, SCHEDULER
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import Announce, Command, FenceWorker, MembersChanged, PeerLost, ReadyPeer, Wake
from nodes.worker import core as worker_core
from nodes.worker.core import WorkerCore
from nodes.worker.draw.edits import edits_of
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.step import POISONED, RunnableStep, StepOutcome
from nodes.worker.vectors.pooling import VectorRows

VOCAB = 997
EOS = 1
PAGE = 4
EDGE = "edge"
NO_STOP = StopRules(max_tokens=1)
SPEC = msgspec.structs.replace(resolve_model("echo"), pooling=Pooling(pool="mean"))


def prompt(length: int, base: int = 0) -> list[int]:
    return [2 + (base * 101 + index * 7) % 900 for index in range(length)]


def asks_of(stop: StopRules) -> list[Any]:
    """What a gateway adds for `min_tokens`."""
    return asked([MinTokens(stop.min_tokens, stop.stop_token_ids)]) if stop.min_tokens else []


def next_token(token_ids: list[int], masked: Container[int] = ()) -> int:
    """What the model says after these tokens; every 23rd time or so it is the end, unless that is masked."""
    digest = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    token = EOS if value % 23 == 0 else 2 + value // 23 % (VOCAB - 2)
    while token in masked:
        token = token % (VOCAB - 1) + 1
    return token


def expected(prompt: list[int], stop: StopRules, context_length: int) -> tuple[list[int], str]:
    """The whole output of a request, and why it ends."""
    tokens = list(prompt)
    masked = {*stop.stop_token_ids, EOS}
    stops = set(stop.stop_token_ids) | (set() if stop.ignore_eos else {EOS})
    limit = min(len(prompt) + stop.max_tokens, context_length)
    while len(tokens) < limit:
        token = next_token(tokens, masked if len(tokens) - len(prompt) < stop.min_tokens else ())
        tokens.append(token)
        if token in stops:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def read_at(context: list[int]) -> bytes:
    """What a worker says of the prompt's token that follows these."""
    return next_token(context).to_bytes(8, "little")


def state_at(context: list[int]) -> list[float]:
    """What the model's last state is after these tokens."""
    return [next_token(context) / 8, float(len(context)), 1.0]


def expected_vector(prompt: list[int], kind: str) -> bytes:
    """What is pooled of a whole prompt, state after state."""
    states = np.array([state_at(prompt[: at + 1]) for at in range(len(prompt))], np.float32)
    if kind != "mean":
        return states[-1 if kind == "last" else 0].tobytes()
    total = states[0]
    for state in states[1:]:
        total = total + state
    return (total / np.float32(len(prompt))).tobytes()


class Worker:
    """A worker's own core over pages of token ids; steps run at once. A restart is another incarnation of both."""

    numerics = ""

    def __init__(self, memory: dict[int, list[int]]) -> None:
        self.memory = memory
        self.epoch = 0
        self.poison: set[int] = set()
        self.is_deaf = False
        self.row_counts: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        # Of contexts and steps the scheduler is the judge here: what any test lets it send is shorter.
        limits = Limits(len(self.memory), PAGE, VOCAB, 1 << 20, 1 << 20)
        self.core = WorkerCore(limits, end_token_ids=(EOS,), spec=SPEC)

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.row_counts)

    def adopted(self) -> Adopted:
        """What is answered to the scheduler that adopts. Ranks, and tests of liars, say something else."""
        return Adopted(worker_epoch=self.epoch, numerics=self.numerics, vocab_size=VOCAB, asks=[*ASK_NAMES, VECTORS])

    def told(self, result: StepResult) -> list[StepResult]:
        """What goes out for a result. Tests of liars put something else here."""
        return [result]

    def handle(self, event: worker_core.Event) -> list[worker_core.Command]:
        """What the core wants but for the steps, which have been run."""
        pending, wanted = deque(self.core.handle(event)), []
        while pending:
            command = pending.popleft()
            # The core would refuse these and go on; no scheduler of this project may bring it to that.
            assert not isinstance(command, worker_core.TellMismatch), command
            if isinstance(command, worker_core.RunStep):
                done = worker_core.StepDone(self.run(command.runnable), 0.0)
                pending.extend(self.core.handle(done))
            else:
                wanted.append(command)
        results = [one.result for one in wanted if isinstance(one, worker_core.SendResult)]
        assert not [error for one in results for error in one.errors if error.code.startswith("bad_")], results
        return wanted

    def run(self, step: RunnableStep) -> StepOutcome:
        drawn, errors, read, states, firsts = [], [], [], [], []
        self.row_counts.append((len(step.rows), sum(row.num_tokens for row in step.rows)))
        for row in step.rows:
            tokens = step.token_ids[row.token_offset : row.token_offset + row.num_tokens]
            pages = step.page_ids[row.page_offset :]
            drawn.append(-1)
            read.append(b"")
            firsts.append(len(states))
            states += [[0.0] * 3] * row.num_tokens
            if self.poison & set(tokens):
                errors.append(RowError(row.row, POISONED, "the row raised", retryable=False))
                continue
            self.write(pages, row.start, tokens)
            # Out of the pages and not of what was sent, so that a page that is another's shows in the token.
            context = [self.memory[pages[position // PAGE]][position % PAGE] for position in range(row.end)]
            if row.sequence.prompt_reads is not None:
                last = min(row.end, row.sequence.num_prompt_tokens - 1)
                read[-1] = b"".join(read_at(context[: at + 1]) for at in range(row.start, last))
            if row.sequence.kind != TOKENS:
                states[firsts[-1] :] = [state_at(context[: at + 1]) for at in range(row.start, row.end)]
            if row.sampling is not None:
                edits = edits_of(row)
                drawn[-1] = next_token(context, edits.floor if isinstance(edits, RowEdits) else ())
        outcome, vectors = StepOutcome(drawn, errors, prompt_extras=read if any(read) else ()), VectorRows(step.rows)
        pooled = [states[at] for at in vectors.places(firsts)]
        return vectors.beside(outcome, np.array(pooled, np.float32).reshape(-1, 3))

    def write(self, pages: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            assert pages[position // PAGE] > 0, "page 0 is the padding's"
            self.memory[pages[position // PAGE]][position % PAGE] = token


class Agent:
    """The agent of one group: its own core decides, and copies are done at once."""

    def __init__(self, world: "World", pool: PoolHandle) -> None:
        self.world = world
        self.name = pool.agent
        self.core = AgentCore(pool.agent, [Pool(pool.group, pool.path, pool.num_pages, pool.layout, 1)], Bounds())
        self.layout_digest = pool.layout.digest
        self.calls: dict[int, Packet] = {}
        self.fail_next = False
        # Hashes of what its disk has, one after the other.
        self.stored = b""

    def take(self, packet: "Packet") -> None:
        self.calls[packet.ask_id] = packet
        match packet.message:
            case OpenGrants() | CloseGrant():
                self.event(Asked(packet.sender, packet.message, packet.ask_id))
            case ListStoredPages():
                self.world.reply(self.calls.pop(packet.ask_id), StoredPagesListed(hashes=self.stored))
            case AnnouncePages():
                self.event(Told(packet.sender, packet.message))

    def event(self, event: agent_events.Event) -> None:
        pending = [event]
        while pending:
            for command in self.core.handle(pending.pop(0), self.world.now):
                match command:
                    case Reply(call, message):
                        self.world.reply(self.calls.pop(call), message)
                    case Refuse(call, code):
                        self.world.refuse(self.calls.pop(call), code)
                    case Tell(receiver, message):
                        kind = "failed" if isinstance(message, TransferFailed) else "pulled"
                        self.world.put(self.name, receiver, TransferNews(**{kind: [message]}))
                    case agent_events.MapForeign(source):
                        pending.append(agent_events.SourceMapped(source, 1, self.layout_digest))
                    case agent_events.StartPull():
                        ended = CopyEnded(command.copy.copy_id, self.copy(command))
                        pending.append(agent_events.CopyDone(command.grant_id, ended, 0))

    def copy(self, pull: agent_events.StartPull) -> str:
        """Copy pages as they are now; returns why that cannot be."""
        source, target = (
            self.world.cores[pull.source.group].books.cache.blocks,
            self.world.cores[pull.group].books.cache.blocks,
        )
        copy = pull.copy
        pages = list(zip(copy.source_pages, copy.source_generations, copy.pages, copy.generations, strict=True))
        if self.fail_next or any(source.generation(page) != generation for page, generation, _, _ in pages):
            self.fail_next = False
            return "stale_pages"
        for page, _, destination, generation in pages:
            assert target.generation(destination) == generation, "a granted page was allocated again"
            self.world.memories[pull.group][destination][:] = self.world.memories[pull.source.group][page]
        return ""


@dataclass
class Request:
    """One request as the gateway sees it."""

    request_id: str
    prompt: list[int]
    stop: StopRules
    scheduler: str
    prefill: str
    attempt: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish: str = ""
    failure: str = ""
    why: str = ""
    num_cached_tokens: int = -1
    is_accepted: bool = False
    is_cancelled: bool = False
    num_finishes: int = 0
    extra_key: str = ""
    priority: int = 0
    reading: PromptPayloads | None = None
    kind: str = TOKENS
    vector: bytes = b""
    client: str = ""
    weight: int = 1

    @property
    def is_over(self) -> bool:
        return bool(self.finish or self.failure or self.is_cancelled)


@dataclass
class Packet:
    sender: Address
    receiver: str
    message: Any
    buffers: list[bytes] = field(default_factory=list)
    ask_id: int = 0
    is_reply: bool = False


class World:
    """Scheduler cores named after their groups, and everything around them."""

    unchecked: ClassVar[list["World"]] = []

    def __init__(self, *, num_pages: dict[str, int], **settings: Any) -> None:
        self.unchecked.append(self)
        self.now = 100.0
        self.cores: dict[str, SchedulerCore] = {}
        self.workers: dict[str, Worker] = {}
        self.agents: dict[str, Agent] = {}
        self.memories: dict[str, dict[int, list[int]]] = {}
        self.links: dict[tuple[str, str], deque[Packet]] = {}
        self.asks: dict[int, tuple[str, Any, float]] = {}
        self.requests: dict[str, Request] = {}
        self.streams: dict[tuple[str, int], tuple[str, int, int]] = {}
        self.published: list[tuple[str, str, Any]] = []
        self.announced: list[tuple[str, str | None, bool]] = []
        self.refused: list[tuple[str, str]] = []
        self.calls: dict[int, Packet] = {}
        self.down: set[str] = set()
        self.detokenizer_epoch = 1
        self._count = 0
        self._settings = {"context_length": 256, "eos_token_ids": (EOS,), "page_size": PAGE, "step_tokens": 32}
        self._settings |= {"chunk_tokens": 8, "max_running": 16, "local_prefill_max": 4}
        # Steps here take no time, so that every plan would have eight: tests that count steps want one at a time.
        self._settings |= {"plan_horizon_s": 0.0, **settings}
        for name, pages in num_pages.items():
            self.add(name, pages)
        for core in list(self.cores.values()):
            self.perform(core, core.start(self.now))
        self.members()

    def add(self, name: str, num_pages: int, epoch: int = 1) -> SchedulerCore:
        config = SchedulerConfig(group=name, worker=f"w-{name}", agent=f"a-{name}", **self._settings)
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE)
        pool = PoolHandle(group=name, agent=f"a-{name}", path="", num_pages=num_pages, layout=layout, incarnation=1)
        cache = PrefixCache(num_pages, PAGE, group=name, epoch=epoch)
        self.memories[name] = {page: [-9] * PAGE for page in range(num_pages)}
        self.cores[name] = SchedulerCore(config, Address(name, epoch), pool, cache, "n")
        self.workers[f"w-{name}"] = Worker(self.memories[name])
        self.agents[f"a-{name}"] = Agent(self, pool)
        return self.cores[name]

    # the wire

    def put(self, sender: str, receiver: str, message: Any, **more: Any) -> None:
        if receiver in self.down or sender in self.down:
            return
        address = Address(sender, self.epoch(sender))
        message = NODE_CODEC.decode(NODE_CODEC.encode(message))
        self.links.setdefault((sender, receiver), deque()).append(Packet(address, receiver, message, **more))

    def epoch(self, actor_id: str) -> int:
        if actor_id in self.cores:
            return self.cores[actor_id].books.address.epoch
        return self.workers[actor_id].epoch if actor_id in self.workers else 1

    def busy_links(self) -> list[tuple[str, str]]:
        return sorted(link for link, packets in self.links.items() if packets)

    def deliver(self, link: tuple[str, str]) -> None:
        self.receive(self.links[link].popleft())

    def drop(self, link: tuple[str, str]) -> None:
        self.links[link].popleft()

    def repeat(self, link: tuple[str, str]) -> None:
        packet = self.links[link][0]
        self.links[link].appendleft(packet)

    def receive(self, packet: Packet) -> None:
        receiver, message = packet.receiver, packet.message
        if receiver in self.down:
            return
        if packet.is_reply:
            pending = self.asks.pop(packet.ask_id, None)
            if pending is None:
                return
            if isinstance(message, AttemptsSubmitted):
                self.submitted(packet.sender.actor_id, message)
            if receiver in self.cores:
                self.event(receiver, Answered(pending[1], message))
        elif receiver in self.cores:
            if packet.ask_id:
                self.calls[packet.ask_id] = packet
                self.event(receiver, Asked(packet.sender, message, packet.ask_id))
            else:
                self.event(receiver, Told(packet.sender, message))
        elif receiver in self.workers:
            self.at_worker(receiver, packet)
        elif receiver in self.agents:
            self.agents[receiver].take(packet)
        else:
            self.at_edge(packet.sender, message)

    def at_worker(self, name: str, packet: Packet) -> None:
        worker = self.workers[name]
        if isinstance(packet.message, Fence):
            if packet.message.worker_epoch == worker.epoch and not worker.is_deaf:
                self.restart_worker(name.removeprefix("w-"))
                self.members()
            return
        event: worker_core.Event
        if isinstance(packet.message, Adopt):
            event = worker_core.AdoptArrived(packet.message, packet)
        else:
            event = worker_core.StepArrived(packet.sender.actor_id, packet.message, packet.buffers)
        for command in worker.handle(event):
            match command:
                case Reply(call):
                    self.reply(call, worker.adopted())
                case Refuse(call, code):
                    self.calls[call.ask_id] = call
                    self.refuse(call, code)
                case worker_core.SendResult(scheduler, result):
                    for told in worker.told(result):
                        self.put(name, scheduler, told)
                case _:
                    # A step that was refused: the scheduler sends it again if it still matters.
                    pass

    def reply(self, packet: Packet, message: Any) -> None:
        self.put(packet.receiver, packet.sender.actor_id, message, ask_id=packet.ask_id, is_reply=True)

    # schedulers

    def event(self, name: str, event: Any, *, wake: bool = True) -> list[Command]:
        core = self.cores[name]
        commands = core.handle(event, self.now)
        if wake:
            commands += core.handle(Wake(), self.now)
        self.perform(core, commands)
        return commands

    def perform(self, core: SchedulerCore, commands: list[Command]) -> None:
        name = core.books.address.actor_id
        for command in commands:
            match command:
                case Tell(actor_id, message, _, buffers):
                    self.put(name, actor_id, message, buffers=[bytes(buffer) for buffer in buffers])
                case Ask(actor_id, message, timeout_s, tag):
                    self._count += 1
                    self.asks[self._count] = (name, tag, self.now + timeout_s)
                    self.put(name, actor_id, message, ask_id=self._count)
                case FenceWorker(worker, message):
                    self.put(name, worker, message)
                case Reply(call, message):
                    self.reply(self.calls[call], message)
                case Refuse(call=call, code=code):
                    self.refuse(self.calls[call], code)
                case Publish(topic, message):
                    self.published.append((name, topic, message))
                case Announce(state, worker_ready, _, _):
                    self.announced.append((name, state, worker_ready))

    def refuse(self, packet: Packet, code: str) -> None:
        self.refused.append((packet.receiver, code))
        pending = self.asks.pop(packet.ask_id, None)
        if pending is not None and pending[0] in self.cores:
            self.event(pending[0], AskFailed(pending[1], code))

    def ready(self) -> dict[str, ReadyPeer]:
        ready = {name: ReadyPeer(SCHEDULER, core.books.address.epoch) for name, core in self.cores.items()}
        ready |= {name: ReadyPeer(KV_AGENT, 1) for name in self.agents}
        return ready | {EDGE: ReadyPeer(DETOKENIZER, self.detokenizer_epoch)}

    def members(self) -> None:
        for name in self.cores:
            self.event(name, MembersChanged({key: peer for key, peer in self.ready().items() if key not in self.down}))

    def lose(self, actor_id: str, epoch: int | None = None) -> None:
        """Everyone hears that an incarnation is gone; what was on its links is lost."""
        address = Address(actor_id, self.epoch(actor_id) if epoch is None else epoch)
        for (sender, receiver), packets in self.links.items():
            if actor_id in (sender, receiver):
                packets.clear()
        for ask_id, (asker, tag, _) in list(self.asks.items()):
            target = next((p for p in [self.calls.get(ask_id)] if p), None)
            if target is not None and target.receiver == actor_id:
                del self.asks[ask_id]
                if asker in self.cores:
                    self.event(asker, AskFailed(tag, "peer_lost"))
        for name in self.cores:
            if name != actor_id:
                self.event(name, PeerLost(address))

    def restart_worker(self, name: str) -> None:
        old = self.workers[f"w-{name}"].epoch
        self.workers[f"w-{name}"].restart()
        self.lose(f"w-{name}", old)

    # the edge: gateway and detokenizer in one

    def submit(
        self,
        prompt: list[int],
        scheduler: str,
        *,
        prefill: str = "",
        request_id: str = "",
        extra_key: str = "",
        priority: int = 0,
        is_read: bool = False,
        kind: str = TOKENS,
        client: str = "",
        weight: int = 1,
        **stop: Any,
    ) -> Request:
        request_id = request_id or f"r{len(self.requests)}"
        request = Request(request_id, prompt, StopRules(**{"max_tokens": 8, **stop}), scheduler, prefill)
        request.extra_key, request.priority, request.kind = extra_key, priority, kind
        request.client, request.weight = client, weight
        request.reading = PromptPayloads(0, len(prompt)) if is_read else None
        self.requests[request_id] = request
        self.send_submit(request)
        return request

    def send_submit(self, request: Request) -> None:
        asks = asks_of(request.stop) + (asked([PromptLogprobs(0)]) if request.reading else [])
        message = Submit(
            request_id=request.request_id,
            attempt=request.attempt,
            gateway=EDGE,
            detokenizer=EDGE,
            prompt_ids=request.prompt,
            spec=RequestSpec(
                Sampling(seed=7, asks=asks),
                request.stop,
                request.priority,
                request.extra_key,
                kind=request.kind,
                client=request.client,
                weight=request.weight,
            ),
            output_ids=request.output_ids[: request.stop.max_tokens - 1] if request.stop.max_tokens else [],
            prefill=request.prefill,
            prompt_position=request.reading.next if request.reading else 0,
        )
        self.ask_from_edge(request.scheduler, message)

    def ask_from_edge(self, scheduler: str, message: Any) -> None:
        self._count += 1
        self.asks[self._count] = (EDGE, message, self.now + 5.0)
        sent = SubmitAttempts(attempts=[message]) if isinstance(message, Submit) else message
        self.put(EDGE, scheduler, sent, ask_id=self._count)

    def submitted(self, scheduler: str, answer: AttemptsSubmitted) -> None:
        for ref in answer.held:
            self.requests[ref.request_id].is_accepted = True
        for one in answer.refused:
            self.refused.append((scheduler, one.code))
            request = self.requests[one.request_id]
            if request.attempt == one.attempt and not request.is_accepted and one.code != "attempt_over":
                request.failure, request.why = one.code, one.message

    def cancel(self, request: Request) -> None:
        request.is_cancelled = not (request.finish or request.failure)
        message = CancelAttempts(attempts=[AttemptRef(request.request_id, request.attempt)])
        self.ask_from_edge(request.scheduler, message)

    def resend(self, request: Request, position: int | None = None, detokenizer: str = "") -> None:
        at = len(request.output_ids) if position is None else position
        gap = ResendFrom(request.request_id, request.attempt, at)
        self.put(EDGE, request.scheduler, Resend(streams=[gap], detokenizer=detokenizer))

    def at_edge(self, sender: Address, message: Any) -> None:
        if isinstance(message, AttemptFailed):
            request = self.requests.get(message.request_id)
            if request is None or request.attempt != message.attempt or request.is_over:
                return
            if message.retryable and request.attempt < 5:
                request.attempt += 1
                request.is_accepted = False
                self.send_submit(request)
            else:
                request.failure, request.why = message.code, message.message
        elif isinstance(message, TokenBatch):
            self.take_tokens(sender.actor_id, message)
        elif isinstance(message, PromptRead):
            request = self.requests[message.request_id]
            assert request.reading is not None, "nobody asked for it"
            assert request.reading.add(message.position, message.count, message.payload)
        elif isinstance(message, Pooled):
            self.take_vector(message)

    def take_vector(self, message: Pooled) -> None:
        request = self.requests[message.request_id]
        if message.attempt != request.attempt or request.is_over:
            return
        assert request.kind != TOKENS, "nobody asked for it"
        request.vector, request.finish = message.vector, "stop"
        request.num_finishes += 1
        request.num_cached_tokens = message.num_cached_tokens
        self.cancel(request)

    def take_tokens(self, scheduler: str, batch: TokenBatch) -> None:
        for opening in batch.opens:
            key = (scheduler, opening.stream)
            self.streams[key] = (opening.request_id, opening.attempt, len(opening.output_ids))
            request = self.requests[opening.request_id]
            known = min(len(request.output_ids), len(opening.output_ids))
            assert request.output_ids[:known] == opening.output_ids[:known]
            if opening.attempt == 0 and request.num_cached_tokens < 0:
                request.num_cached_tokens = opening.num_cached_tokens
        offset = 0
        unknown = []
        for stream, position, count in zip(batch.streams, batch.positions, batch.counts, strict=True):
            tokens = batch.token_ids[offset : offset + count]
            offset += count
            if (scheduler, stream) not in self.streams:
                unknown.append(stream)
                continue
            self.take_run(scheduler, stream, position, tokens)
        for finish in batch.finishes:
            known = self.streams.get((scheduler, finish.stream))
            if known is None:
                unknown.append(finish.stream)
                continue
            request = self.requests[known[0]]
            if known[1] == request.attempt and len(request.output_ids) == finish.position and not request.is_over:
                request.finish = finish.reason
                request.num_finishes += 1
                self.cancel(request)
        for stream in batch.closes:
            self.streams.pop((scheduler, stream), None)
        if unknown:
            self.put(EDGE, scheduler, Resend(streams=[], streams_unknown=unknown))

    def take_run(self, scheduler: str, stream: int, position: int, tokens: list[int]) -> None:
        request_id, attempt, at = self.streams[scheduler, stream]
        request = self.requests[request_id]
        if attempt != request.attempt:
            return
        if position > at:
            gap = ResendFrom(request_id, attempt, at)
            self.put(EDGE, scheduler, Resend(streams=[gap]))
            return
        new = tokens[at - position :]
        self.streams[scheduler, stream] = (request_id, attempt, at + len(new))
        if request.is_over:
            return
        num_known = len(request.output_ids) - at
        assert num_known >= 0, "a stream is ahead of its gateway"
        assert new[:num_known] == request.output_ids[at : at + len(new[:num_known])], "sent again, but different"
        request.output_ids.extend(new[num_known:])

    # time

    def step(self, name: str = "m", seconds: float = 0.02) -> None:
        """One step of a group's worker, and all that comes of it; so much time passes meanwhile."""
        self.flush(f"w-{name}")
        for link in ((name, f"w-{name}"), (f"w-{name}", name)):
            if self.links.get(link):
                self.deliver(link)
        self.flush(f"w-{name}")
        self.advance(self.now + seconds)

    def flush(self, *without: str | tuple[str, str]) -> None:
        """Deliver everything, link by link in turn; nothing on the links or to and from the actors in `without`."""
        for _ in range(100_000):
            links = [link for link in self.busy_links() if not {link, *link} & set(without)]
            if not links:
                return
            for link in links:
                if self.links[link]:
                    self.deliver(link)
        raise AssertionError("messages go round without end")

    def until(self, is_so: Callable[[], object]) -> None:
        """Deliver the head of the first busy link until it is so."""
        while not is_so():
            self.deliver(self.busy_links()[0])

    def next_time(self) -> float | None:
        times = [at for _, _, at in self.asks.values()]
        times += [at for core in self.cores.values() if (at := core.next_deadline()) is not None]
        times += [at for agent in self.agents.values() if (at := agent.core.next_deadline) is not None]
        return min(times, default=None)

    def advance(self, to: float) -> None:
        """Let time pass; asks whose time is over fail, deadlines are worked through."""
        while (at := self.next_time()) is not None and at <= to:
            self.now = max(self.now, at)
            for ask_id, (asker, tag, deadline) in list(self.asks.items()):
                if deadline <= self.now:
                    del self.asks[ask_id]
                    if asker in self.cores:
                        self.event(asker, AskFailed(tag, "deadline_exceeded"))
                    elif isinstance(tag, Submit) and not self.requests[tag.request_id].is_accepted:
                        self.send_submit(self.requests[tag.request_id])
                    elif isinstance(tag, CancelAttempts):
                        self.ask_from_edge(self.requests[tag.attempts[0].request_id].scheduler, tag)
            for name, core in self.cores.items():
                deadline = core.next_deadline()
                if deadline is not None and deadline <= self.now:
                    self.perform(core, core.handle(Wake(), self.now))
                    after = core.next_deadline()
                    assert after is None or after > self.now, f"{name} wants to be woken again and again"
            for agent in self.agents.values():
                if (deadline := agent.core.next_deadline) is not None and deadline <= self.now:
                    agent.event(agent_events.Tick())
        self.now = max(self.now, to)

    def settle(self, limit_s: float = 300.0) -> None:
        """Deliver everything and let time run until every request is over and nothing is to be done."""
        until = self.now + limit_s
        asked_at = self.now
        while self.now < until:
            self.flush()
            at = self.next_time()
            open_requests = [one for one in self.requests.values() if not one.is_over]
            if at is None and not open_requests:
                return
            if open_requests and self.now - asked_at >= 1.0:
                asked_at = self.now
                for request in open_requests:
                    self.resend(request)
                continue
            self.advance(min(self.now + 0.5, until) if open_requests else min(at or until, until))
        raise AssertionError(f"not settled: {[one for one in self.requests.values() if not one.is_over]}")

    def leave(self) -> None:
        """It comes to no end, or to a bad one, which is what its test shows."""
        self.unchecked.remove(self)

    def check(self) -> None:
        """Every request ended once and right; nothing is held anywhere."""
        if self in self.unchecked:
            self.unchecked.remove(self)
        for request in self.requests.values():
            if request.finish and request.kind != TOKENS:
                assert (request.vector, request.output_ids) == (expected_vector(request.prompt, request.kind), [])
                assert request.num_finishes == 1
            elif request.finish:
                context_length = self._settings["context_length"]
                assert (request.output_ids, request.finish) == expected(request.prompt, request.stop, context_length)
                assert request.num_finishes == 1
            if request.finish and request.reading:
                expected_read = [read_at(request.prompt[:at]) for at in range(1, len(request.prompt))]
                assert request.reading.since(1) == b"".join(expected_read)
        for core in self.cores.values():
            core.assert_idle()
        for agent in self.agents.values():
            assert not agent.core.num_live


def started(**more: Any) -> World:
    """A world that has taken its workers; of one group, unless something else is said."""
    world = World(**{"num_pages": {"m": 60}, **more})
    world.flush()
    return world
