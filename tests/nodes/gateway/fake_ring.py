"""A whole ring around a real gateway, in one process: real actor systems and frames, a mind of bytes.

The tokenizer's ids are UTF-8 bytes, the scheduler repeats the prompt byte by byte (end of text is id 256) and plays
the detokenizer too. `Faults` says what goes wrong. `ServedRing` runs it in a thread with a real HTTP port, for clients
that block.
"""

import asyncio
import codecs
import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import msgspec

from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.actors import Actors
from nodes.asks import DrawnModel, RowReads, open_asks
from nodes.gateway.actor import Gateway
from nodes.gateway.config import GatewayConfig
from nodes.gateway.local import LocalGateway
from nodes.protocol import (
    AttemptFailed,
    AttemptRefused,
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    ChooseMoves,
    ChooseRoute,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    MovesChosen,
    Pooled,
    Prepare,
    Prepared,
    PromptRead,
    Resend,
    Route,
    Submit,
    SubmitAttempts,
    TemplateIs,
    TextBatch,
    TextDelta,
    TokenizerIs,
    VocabularyIs,
)
from nodes.registry.actor import RegistryActor
from nodes.request import AttemptRef
from nodes.roles import DETOKENIZER, NODE_CODEC, SCHEDULER, TOKENIZER, WORKER
from tests.mesh.mesh_under_test import until

END_OF_TEXT = 256
END_TEXT = b"<end>"
MOST_CHARS = 25_000
"""Longer texts are not encoded, unless they are cut."""
VECTOR_SIZE = 8
QUICK = SystemOptions(heartbeat_s=0.1, hello_timeout_s=1.0, join_timeout_s=1.0, retry_min_s=0.01, retry_max_s=0.1)
CONFIG = GatewayConfig(
    quantization="int8", model_name="bytes", model="test", aliases=("other-bytes",), context_length=200,
    vocab_size=257, port=0, max_body_bytes=100_000, body_timeout_s=0.5, prepare_timeout_s=1.0, role_wait_s=0.3,
    recovery_timeout_s=3.0, quiet_s=0.15,
)  # fmt: skip


@dataclass
class Faults:
    """What goes wrong, counted down where it is a number."""

    step_s: float = 0.0
    tokens_per_step: int = 1
    failing_attempts: int = 0
    fail_after: int = 0
    fail_code: str = "worker_lost"
    fail_retryable: bool = True
    refuse_submits: str = ""
    silent: bool = False
    drop_batches: int = 0
    drop_reads: int = 0
    prepare_silent: bool = False
    vocabulary_silent: bool = False
    tokenizer_error: tuple[str, bool] | None = None


@dataclass
class Seen:
    """What the ring was told, for assertions."""

    submits: list[Submit] = field(default_factory=list)
    cancels: list[Any] = field(default_factory=list)
    resends: list[Resend] = field(default_factory=list)
    prepares: list[Prepare] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    moves: list[ChooseMoves] = field(default_factory=list)
    num_vocabularies: int = 0


class FakeTokenizer(Actor):
    role = TOKENIZER
    codec = NODE_CODEC

    def __init__(self, faults: Faults, seen: Seen) -> None:
        self.faults = faults
        self.seen = seen
        self.template = TemplateIs(template="")

    def on_ask(self, call: Call) -> None:
        if self.faults.prepare_silent:
            return
        if self.faults.tokenizer_error is not None:
            code, retryable = self.faults.tokenizer_error
            call.fail(code, "as told", retryable=retryable)
            return
        match call.message:
            case Prepare():
                self.seen.prepares.append(call.message)
                self.seen.traceparents.append(call.traceparent)
                self.prepare(call, call.message)
            case ChooseRoute():
                call.reply(self.route(call.message.excluded))
            case ChooseMoves():
                self.seen.moves.append(call.message)
                moves = {one.request_id: self.route([call.message.holder]) for one in call.message.requests}
                call.reply(MovesChosen(routes=moves))
            case DescribeVocabulary():
                self.seen.num_vocabularies += 1
                if self.faults.vocabulary_silent:
                    return
                offsets = struct.pack("<258I", *range(257), 256 + len(END_TEXT))
                ends = VocabularyIs(num_tokens=257, end_token_ids=[END_OF_TEXT])
                call.reply(ends, (offsets, bytes(range(256)) + END_TEXT))
            case DescribeTokenizer():
                call.reply(TokenizerIs(document=b'{"tokenizer_class": "Bytes"}'))
            case DescribeTemplate():
                call.reply(self.template)
            case Detokenize():
                call.reply(Detokenized(text=bytes(i for i in call.message.token_ids if i < 256).decode()))
            case _:
                super().on_ask(call)

    def prepare(self, call: Call, message: Prepare) -> None:
        if message.chat is not None:
            messages = msgspec.json.decode(message.chat)
            if messages[0]["role"] == "bad":
                call.fail("template_error", "the template does not like this role", param="messages")
                return
            texts = ["".join(str(m.get("content") or "") for m in messages)]
        else:
            texts = message.texts or []
        texts = [
            one + other + message.after for one, other in zip(texts, message.seconds or [""] * len(texts), strict=True)
        ]
        most = message.truncate_to
        if not most and any(len(text) > MOST_CHARS for text in texts):
            call.fail("context_length_exceeded", f"more than {MOST_CHARS} characters in your prompt", param="prompt")
            return
        prompts = message.token_ids or [list(text.encode()) for text in texts]
        prompts = [prompt[:most] if most and message.truncate_end else prompt[-most:] for prompt in prompts]
        routes = [self.route([]) for _ in prompts] if message.route else []
        starts = [] if message.seconds is None else [len(one.encode()) for one in message.texts or ()]
        call.reply(Prepared(token_ids=prompts, routes=routes, second_from=starts))

    def route(self, excluded: list[str]) -> Route:
        schedulers = [m.actor_id for m in self.ctx.members.by_role(SCHEDULER)]
        left = [actor_id for actor_id in schedulers if actor_id not in excluded] or schedulers
        return Route(decode=left[0] if left else "nobody", detokenizer="t0")


@dataclass
class Held:
    submit: Submit
    output_ids: list[int]
    finish: str | None = None


class FakeScheduler(Actor):
    role = SCHEDULER
    codec = NODE_CODEC

    def __init__(self, faults: Faults, seen: Seen) -> None:
        self.faults = faults
        self.seen = seen
        self.held: dict[str, Held] = {}
        self.stepping = False

    def on_ask(self, call: Call) -> None:
        match call.message:
            case SubmitAttempts():
                held, refused = [], []
                for submit in call.message.attempts:
                    self.seen.submits.append(submit)
                    if code := self.faults.refuse_submits:
                        refused.append(AttemptRefused(
                            request_id=submit.request_id, attempt=submit.attempt, code=code, message="as told",
                            retryable=code != "never_fits",
                        ))  # fmt: skip
                        continue
                    self.held[submit.request_id] = Held(submit, list(submit.output_ids))
                    self.tell_read(submit, submit.prompt_position)
                    held.append(AttemptRef(submit.request_id, submit.attempt))
                call.reply(AttemptsSubmitted(held=held, refused=refused))
                self.wake()
            case CancelAttempts():
                for ref in call.message.attempts:
                    self.seen.cancels.append(ref)
                    held = self.held.get(ref.request_id)
                    if held is not None and held.submit.attempt <= ref.attempt:
                        del self.held[ref.request_id]
                call.reply(AttemptsCancelled(attempts=call.message.attempts))
            case _:
                super().on_ask(call)

    def on_tell(self, sender: Address, message: Any, buffers: Any) -> None:
        assert isinstance(message, Resend)
        self.seen.resends.append(message)
        for stream in message.streams:
            held = self.held.get(stream.request_id)
            if held is None or held.submit.attempt != stream.attempt:
                self.ctx.tell(sender.actor_id, AttemptFailed(
                    request_id=stream.request_id, attempt=stream.attempt, code="unknown_attempt"
                ))  # fmt: skip
                continue
            if stream.prompt_position:
                self.tell_read(held.submit, stream.prompt_position)
            if held.submit.spec.is_vector and held.finish is not None:
                self.tell_vector(held)
            if held.output_ids:
                self.ctx.tell(sender.actor_id, TextBatch(deltas=[self.delta(held, stream.position)]))

    def tell_read(self, submit: Submit, begin: int) -> None:
        """What was read of the prompt from a position on, told in pieces of three positions."""
        reads, prompt = open_asks(submit.spec.sampling.asks, DrawnModel(257)).prompt_reads, submit.prompt_ids
        if reads is None:
            return
        for first in range(max(1, begin), len(prompt), 3):
            places = range(first, min(first + 3, len(prompt)))
            if self.faults.drop_reads:
                self.faults.drop_reads -= 1
                continue
            self.ctx.tell(submit.gateway, PromptRead(
                request_id=submit.request_id, attempt=submit.attempt, position=first, count=len(places),
                payload=b"".join(payload_of(at, prompt[at], reads) for at in places),
            ))  # fmt: skip

    def tell_vector(self, held: Held) -> None:
        """How often each of eight letters, from a on, is in the prompt."""
        if self.faults.drop_batches:
            self.faults.drop_batches -= 1
            return
        submit = held.submit
        numbers = [float(submit.prompt_ids.count(97 + n)) for n in range(VECTOR_SIZE)]
        self.ctx.tell(submit.gateway, Pooled(
            request_id=submit.request_id, attempt=submit.attempt, vector=struct.pack(f"<{VECTOR_SIZE}f", *numbers),
        ))  # fmt: skip

    def wake(self) -> None:
        if not self.stepping and not self.faults.silent:
            self.stepping = True
            self.ctx.later(self.faults.step_s, self.step)

    def step(self) -> None:
        self.stepping = False
        batches: dict[str, list[TextDelta]] = {}
        for held in list(self.held.values()):
            if held.finish is not None:
                continue
            if self.faults.failing_attempts and len(held.output_ids) >= self.faults.fail_after:
                self.fail(held)
                continue
            if held.submit.spec.is_vector:
                held.finish = "stop"
                self.tell_vector(held)
                continue
            start = len(held.output_ids)
            for _ in range(self.faults.tokens_per_step):
                self.draw(held)
            batches.setdefault(held.submit.gateway, []).append(self.delta(held, start))
        for gateway, deltas in batches.items():
            if self.faults.drop_batches:
                self.faults.drop_batches -= 1
            else:
                self.ctx.tell(gateway, TextBatch(deltas=deltas))
        if any(held.finish is None for held in self.held.values()):
            self.wake()

    def fail(self, held: Held) -> None:
        self.faults.failing_attempts -= 1
        del self.held[held.submit.request_id]
        self.ctx.tell(held.submit.gateway, AttemptFailed(
            request_id=held.submit.request_id, attempt=held.submit.attempt, code=self.faults.fail_code,
            message="as told", retryable=self.faults.fail_retryable,
        ))  # fmt: skip

    def draw(self, held: Held) -> None:
        if held.finish is not None:
            return
        submit, position = held.submit, len(held.output_ids)
        prompt = submit.prompt_ids
        at_end = position >= len(prompt) and not submit.spec.stop.ignore_eos and position >= submit.spec.stop.min_tokens
        held.output_ids.append(
            END_OF_TEXT if at_end else prompt[(position + submit.spec.sampling.sample_index) % len(prompt)]
        )
        text = decode(held.output_ids, final=False)
        if (
            at_end
            or any(stop in text for stop in submit.spec.stop.stop)
            or held.output_ids[-1] in submit.spec.stop.stop_token_ids
        ):
            held.finish = "stop"
        elif len(held.output_ids) >= submit.spec.stop.max_tokens:
            held.finish = "length"

    def delta(self, held: Held, start: int) -> TextDelta:
        submit = held.submit
        before = shown(held.output_ids[:start], submit.spec.stop.stop, final=False)
        text = shown(held.output_ids, submit.spec.stop.stop, final=held.finish is not None)
        reads = open_asks(submit.spec.sampling.asks, DrawnModel(257)).reads
        new = range(start, len(held.output_ids))
        beside = [] if reads is None else [payload_of(at, held.output_ids[at], reads) for at in new]
        return TextDelta(
            request_id=submit.request_id, attempt=submit.attempt, position=start, token_ids=held.output_ids[start:],
            text_offset=len(before), text=text[len(before):], finish_reason=held.finish,
            num_cached_tokens=len(submit.prompt_ids) // 2, scheduler=self.ctx.address.actor_id,
            extras=beside,
            stop_string=found_in(held.output_ids, submit.spec.stop.stop) if held.finish == "stop" else "",
        )  # fmt: skip

    def stats(self) -> dict[str, float]:
        running = sum(held.finish is None for held in self.held.values())
        return {
            "mesh_scheduler_num_running": float(running),
            "mesh_scheduler_num_pages": 10.0,
            "mesh_scheduler_kv_usage_ratio": 0.25,
            "mesh_scheduler_load_tokens": 480.0,
            'mesh_scheduler_pages{state="free"}': 7.0,
            "mesh_preemptions_total": 3.0,
        }


def logprob_of(position: int, token_id: int) -> float:
    """Any number that float32 has, another for each token and position; every fifth token was impossible."""
    return float("-inf") if token_id % 5 == 0 else -(token_id + 1) / 64 - position / 1024


def payload_of(position: int, token_id: int, reads: RowReads) -> bytes:
    """What a worker would read: the drawn token is the most likely, and its followers by id come next."""
    likely = [(token_id + 7 * n) % 257 for n in range(reads.top)]
    pairs = b"".join(struct.pack("<if", one, logprob_of(position, one)) for one in likely)
    named = b"".join(struct.pack("<f", logprob_of(position, one)) for one in reads.ids)
    return struct.pack("<fi", logprob_of(position, token_id), 1) + pairs + named


def decode(token_ids: list[int], *, final: bool) -> str:
    data = bytes(i for i in token_ids if i < END_OF_TEXT)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def shown(token_ids: list[int], stops: list[str], *, final: bool) -> str:
    """Text up to a stop string, and without what may yet become one."""
    text = decode(token_ids, final=final)
    cuts = [text.index(stop) for stop in stops if stop in text]
    if cuts:
        return text[: min(cuts)]
    held_back = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text if final or not held_back else text[: -max(held_back)]


def found_in(token_ids: list[int], stops: list[str]) -> str:
    text = decode(token_ids, final=True)
    return next((stop for stop in stops if stop in text), "")


class Silent(Actor):
    codec = NODE_CODEC

    def __init__(self, role: str) -> None:
        self.role = role


class Ring(Actors):
    """Registry, gateway and fakes on one loop. `start` may be called again for what was killed."""

    def __init__(self, config: GatewayConfig = CONFIG, *, serve_http: bool = True) -> None:
        super().__init__(SimulatedNetwork(seed=0), QUICK)
        self.config = config
        self.faults = Faults()
        self.seen = Seen()
        self.serve_http = serve_http

    async def __aenter__(self) -> Self:
        await self.start("registry", RegistryActor(lease_s=1.0))
        await self.start("tok0", FakeTokenizer(self.faults, self.seen))
        await self.start("d0", FakeScheduler(self.faults, self.seen), group="a", policy="priority")
        await self.start("w0", Silent(WORKER), group="a")
        await self.start("t0", Silent(DETOKENIZER))
        await self.start("g0", Gateway(self.config) if self.serve_http else LocalGateway(self.config))
        await until(lambda: not self.gateway.service.missing_roles())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def gateway(self) -> Gateway:
        return self.systems["g0"].actor

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.systems["tok0"].actor

    @property
    def scheduler(self) -> FakeScheduler:
        return self.systems["d0"].actor

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def is_idle(self) -> bool:
        """Nothing of any request is left anywhere."""
        core = self.gateway.service.core
        held = [s.actor.held for s in self.systems.values() if isinstance(s.actor, FakeScheduler)]
        return not any(held) and core.is_idle and self.gateway.service.door.num_calls == 0


def play(scenario: Callable[[Ring, httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario on a ring of its own; afterwards nothing of any request may be left."""

    async def main() -> None:
        config = msgspec.structs.replace(CONFIG, **settings)
        async with Ring(config) as ring, httpx.AsyncClient(base_url=ring.url, verify=False, timeout=20) as client:
            await scenario(ring, client)
            await until(lambda: ring.is_idle)

    asyncio.run(main())


class ServedRing:
    """A `Ring` on a loop of its own in a thread, for clients that block; has what that has.

    Not the ring itself: a test that is a coroutine function enters what it gets first, and would start and stop it.
    """

    def __init__(self, config: GatewayConfig = CONFIG) -> None:
        self.ring = Ring(config)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ring, name)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the ring did not stop"

    def _run(self) -> None:
        with contextlib.suppress(BaseException):
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self.ring:
                self._started.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
            self._started.set()
            raise
