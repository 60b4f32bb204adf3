"""The tokenizer process: chats and texts to token ids, and routes. Stateless but for what routing follows.

Short texts are encoded where they arrive; chats are rendered by a child process (`rendering.py`), long texts encoded in
one thread, so that heartbeats go on. Asked by gateways.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from kvstore.protocol import CacheEvents
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.codec import Codec
from mesh.membership import Member
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol import ChooseRoute, Detokenize, Detokenized, Load, Prepare, Prepared, Route
from nodes.roles import KV_EVENTS_TOPIC, LOAD_TOPIC, NODE_CODEC, TOKENIZER
from nodes.tokenizer.chat_template import ChatRequest
from nodes.tokenizer.config import TokenizerConfig
from nodes.tokenizer.encoding import TextEncoder, load_encoder
from nodes.tokenizer.errors import InvalidRequest, Overloaded, PrepareError, TemplateError
from nodes.tokenizer.rendering import ChildRenderer, InlineRenderer, Renderer
from nodes.tokenizer.routing import (
    CacheChanged,
    CacheUnknown,
    Event,
    Follow,
    LoadChanged,
    MembersChanged,
    RoutingCore,
)

_Result = TypeVar("_Result")


class TokenizerActor(Actor):
    """Answers `Prepare`, `ChooseRoute` and `Detokenize`."""

    role: ClassVar[str] = TOKENIZER
    codec: ClassVar[Codec] = NODE_CODEC

    _encoder: TextEncoder
    _renderer: Renderer | None = None

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._routing = RoutingCore(config.routing)
        self._thread = ThreadPoolExecutor(1, "encode") if config.use_threads else None
        self._num_long = 0

    async def start(self) -> None:
        """Load the tokenizer and warm the renderer. Raises `nodes.model_spec.ModelError`."""
        spec, self._encoder = await self._in_thread(self._load)
        if spec.chat_template is not None:
            self._renderer = self._make_renderer(spec.chat_template, spec.special_tokens)
            problem = await self._renderer.start()
            if problem:
                # Prompts that clients have made themselves are served all the same.
                self.ctx.log.warning("no chats", why=problem)
        self.on_members([], [], [])

    async def stop(self) -> None:
        """End child and thread."""
        if self._renderer is not None:
            await self._renderer.stop()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def on_ask(self, call: Call) -> None:
        """Answer at once if that is quick, else from a task."""
        message = call.message
        try:
            if isinstance(message, Prepare):
                self._on_prepare(call, message)
            elif isinstance(message, ChooseRoute):
                self._encoder.check_ids(message.token_ids, "prompt")
                call.reply(self._route(message.request_id, message.token_ids, message.extra_key, message.excluded))
            elif isinstance(message, Detokenize):
                self._on_detokenize(call, message)
            else:
                super().on_ask(call)
        except PrepareError as error:
            _fail(call, error)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """Schedulers and detokenizers come and go."""
        self._take(MembersChanged(self.ctx.members.all()))

    def on_publication(self, publisher: Address, topic: str, sequence: int, message: Any) -> None:
        """A scheduler's cache or load changed."""
        if isinstance(message, CacheEvents):
            self._take(CacheChanged(publisher.actor_id, message))
        elif isinstance(message, Load):
            self._take(LoadChanged(publisher.actor_id, message))

    def on_subscription_reset(self, publisher: Address, topic: str) -> None:
        """Events were missed."""
        if topic == KV_EVENTS_TOPIC:
            self._take(CacheUnknown(publisher.actor_id))

    def stats(self) -> dict[str, float]:
        """Pages indexed for routing, long texts at work, template processes killed."""
        num_killed = self._renderer.num_killed if isinstance(self._renderer, ChildRenderer) else 0
        return {
            "mesh_tokenizer_indexed_pages": float(self._routing.num_indexed_pages),
            "mesh_tokenizer_long_texts": float(self._num_long),
            "mesh_tokenizer_templates_killed_total": float(num_killed),
        }

    def _load(self) -> tuple[ModelSpec, TextEncoder]:
        spec = resolve_model(self._config.model)
        return spec, load_encoder(spec, self._config.context_length)

    def _make_renderer(self, template: str, special_tokens: dict[str, str]) -> Renderer:
        if self._config.use_processes:
            return ChildRenderer(template, special_tokens, self._encoder.max_chars, self._config.rendering)
        return InlineRenderer(template, special_tokens, self._encoder.max_chars)

    def _take(self, event: Event) -> None:
        for command in self._routing.handle(event):
            act = self.ctx.subscribe if isinstance(command, Follow) else self.ctx.unsubscribe
            act(command.scheduler, KV_EVENTS_TOPIC)
            act(command.scheduler, LOAD_TOPIC)

    def _on_prepare(self, call: Call, message: Prepare) -> None:
        if sum(field is not None for field in (message.chat, message.texts, message.token_ids)) != 1:
            raise InvalidRequest("exactly one of chat, texts and token_ids is to be given")
        if message.token_ids is not None:
            self._reply_prepared(call, message, message.token_ids, "prompt")
        elif message.texts is not None and sum(map(len, message.texts)) <= self._config.inline_chars:
            special = message.add_special_tokens
            prompts = [self._encoder.encode(text, add_special_tokens=special) for text in message.texts]
            self._reply_prepared(call, message, prompts, "prompt")
        else:
            self.ctx.spawn(self._prepare_slowly(call, message), name=f"prepare {message.request_id}")

    async def _prepare_slowly(self, call: Call, message: Prepare) -> None:
        try:
            if message.texts is not None:
                texts, param, special = message.texts, "prompt", message.add_special_tokens
            else:
                texts, param, special = [await self._render(message)], "messages", False
            prompts = [await self._encode(call, text, param, special) for text in texts]
            self._reply_prepared(call, message, prompts, param)
        except PrepareError as error:
            _fail(call, error)

    async def _render(self, message: Prepare) -> str:
        if self._renderer is None:
            raise TemplateError("this model has no chat template; send a prompt to /v1/completions", "messages")
        return await self._renderer.render(
            ChatRequest(
                chat=message.chat or b"",
                tools=message.tools,
                chat_template_kwargs=message.chat_template_kwargs,
                add_generation_prompt=message.add_generation_prompt,
                continue_final_message=message.continue_final_message,
            )
        )

    async def _encode(self, call: Call, text: str, param: str, special: bool) -> list[int]:
        self._encoder.check_chars(text, param)
        if len(text) <= self._config.inline_chars:
            return self._encoder.encode(text, add_special_tokens=special)
        if self._num_long >= self._config.max_long_texts:
            raise Overloaded(f"{self._num_long} long texts are being encoded; try again later")
        self._num_long += 1
        try:
            # Whoever asked may have gone while others were being encoded.
            return await self._in_thread(
                lambda: [] if call.done else self._encoder.encode(text, add_special_tokens=special)
            )
        finally:
            self._num_long -= 1

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _reply_prepared(self, call: Call, message: Prepare, prompts: list[list[int]], param: str) -> None:
        if call.done:
            return
        routes: list[Route] = []
        for i, token_ids in enumerate(prompts):
            if not message.route:
                self._encoder.check_ids(token_ids, param)
                continue
            self._encoder.check_prompt(token_ids, param)
            # Prompts of one request are independent of each other: they spread.
            request_id = message.request_id if len(prompts) == 1 else f"{message.request_id}/{i}"
            routes.append(self._route(request_id, token_ids, message.extra_key, message.excluded))
        self.ctx.metrics.count("mesh_prompt_tokens_prepared_total", sum(map(len, prompts)))
        call.reply(Prepared(token_ids=prompts, routes=routes))

    def _route(self, request_id: str, token_ids: Sequence[int], extra_key: str, excluded: Sequence[str]) -> Route:
        return self._routing.choose(request_id, token_ids, extra_key, frozenset(excluded), self.ctx.now())

    def _on_detokenize(self, call: Call, message: Detokenize) -> None:
        self._encoder.check_ids(message.token_ids, "tokens")
        text = self._encoder.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)
        call.reply(Detokenized(text=text))


def _fail(call: Call, error: PrepareError) -> None:
    call.fail(error.code, error.message, retryable=error.retryable, param=error.param)
