"""The tokenizer process: turns chats and texts into token ids, and chooses routes. Stateless except for routing.

Short texts are encoded on the event loop; chats are rendered by a child process (`rendering.py`) and long texts encoded
in threads (`long_texts.py`), so that heartbeats go on. Gateways ask it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from kvstore.protocol import CacheEvents
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.membership.view import Member
from mesh.runtime.driver import CoreDriver
from mesh.wire.codec import Codec
from mesh.wire.frames import PeerDown
from nodes.model_spec import ModelError, ModelSpec, describe_model
from nodes.model_spec.small_files import read_template_file
from nodes.model_spec.template_files import require_template
from nodes.numerics import Bits
from nodes.protocol import (
    PROMPT_TAIL_CHARS,
    ChooseMoves,
    ChooseRoute,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    Load,
    MovesChosen,
    Prepare,
    Prepared,
    Route,
    TemplateIs,
    TokenizerIs,
)
from nodes.redaction import PromptRedactor
from nodes.request import VECTORS
from nodes.roles import KV_EVENTS_TOPIC, LOAD_TOPIC, NODE_CODEC, TOKENIZER
from nodes.tokenizer.child.ask_checks import AskChecks
from nodes.tokenizer.child.rendering import ChildRenderer, InlineRenderer, Renderer
from nodes.tokenizer.config import TokenizerConfig
from nodes.tokenizer.errors import ContextLengthExceeded, InvalidRequest, PrepareError, TemplateError
from nodes.tokenizer.routing.core import (
    CacheChanged,
    CacheUnknown,
    Command,
    Event,
    Follow,
    LinkLost,
    LoadChanged,
    MembersChanged,
    PeerDied,
    RoutingCore,
)
from nodes.tokenizer.templates.chat_template import ChatRequest
from nodes.tokenizer.texts.description import describe_tokenizer
from nodes.tokenizer.texts.encoding import TextEncoder, load_encoder
from nodes.tokenizer.texts.long_texts import LongTexts
from nodes.tokenizer.texts.truncation import Truncation

_TEMPLATE_CHARS: Final = 1 << 16
"""Room for a template's own text when tokens are only counted."""


class TokenizerActor(Actor):
    """Answers `Prepare`, `ChooseRoute`, `Detokenize`, `DescribeVocabulary`, `DescribeTemplate`,
    `DescribeTokenizer`.
    """

    role: ClassVar[str] = TOKENIZER
    codec: ClassVar[Codec] = NODE_CODEC

    _spec: ModelSpec
    _encoder: TextEncoder
    _renderer: Renderer | None = None
    _template: str = ""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self.routing = RoutingCore(config.routing)
        self._driver = CoreDriver[Event, Command](
            self,
            "routing",
            lambda event, _: self.routing.handle(event),
            self._perform,
            setup={"weights": config.routing},
            redact=PromptRedactor,
        )
        self._checks = AskChecks(config.rendering, self._on_ignored, use_process=config.use_processes)
        self._prompts = LongTexts("encode", config.max_long_texts, use_thread=config.use_threads)
        self._counted = LongTexts("tokenize", config.max_counted_texts, use_thread=config.use_threads)

    async def start(self) -> None:
        """Raises `nodes.model_spec.ModelError`."""
        self.ctx.metrics.begin("mesh_prompt_tokens_prepared_total")
        self._spec, self._encoder = await self._prompts.run(self._load)
        spec = self._spec
        template = read_template_file(Path(chosen)) if (chosen := self._config.chat_template) else spec.chat_template
        if template is not None:
            self._template = template
            self._renderer = self._make_renderer(template, spec.special_tokens)
            problem = await self._renderer.start()
            if problem:
                # Prompts that clients render themselves are served all the same.
                self.ctx.log.warning("no chats", why=problem)
        self.on_members([], [], [])

    async def stop(self) -> None:
        if self._renderer is not None:
            await self._renderer.stop()
        await self._checks.stop()
        self._prompts.close()
        self._counted.close()

    def on_ask(self, call: Call) -> None:
        message = call.message
        try:
            if isinstance(message, Prepare):
                self._on_prepare(call, message)
            elif isinstance(message, ChooseRoute):
                self._encoder.check_ids(message.token_ids, "prompt")
                call.reply(self._route(message))
            elif isinstance(message, ChooseMoves):
                call.reply(MovesChosen(routes=self._moves(message)))
            elif isinstance(message, Detokenize):
                self._on_detokenize(call, message)
            elif isinstance(message, DescribeVocabulary):
                self.ctx.spawn(self._describe_vocabulary(call), name="describe vocabulary")
            elif isinstance(message, DescribeTokenizer):
                self.ctx.spawn(self._describe_tokenizer(call), name="describe tokenizer")
            elif isinstance(message, DescribeTemplate):
                shows_tools = self._renderer is not None and self._renderer.shows_tools
                call.reply(
                    TemplateIs(template=self._template, added_ids=self._encoder.added_ids, shows_tools=shows_tools)
                )
            else:
                super().on_ask(call)
        except PrepareError as error:
            _fail(call, error)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        self._driver.feed(MembersChanged(self.ctx.members.all()))

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        self._driver.feed(LinkLost(peer, self.ctx.now()))

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        self._driver.feed(PeerDied(Address(down.actor_id, down.epoch)))

    def on_publication(self, publisher: Address, topic: str, sequence: int, message: Any) -> None:
        if isinstance(message, CacheEvents):
            self._driver.feed(CacheChanged(publisher.actor_id, message))
        elif isinstance(message, Load):
            self._driver.feed(LoadChanged(publisher.actor_id, message))

    def on_subscription_reset(self, publisher: Address, topic: str) -> None:
        if topic == KV_EVENTS_TOPIC:
            self._driver.feed(CacheUnknown(publisher.actor_id))

    def stats(self) -> dict[str, float]:
        num_killed = self._renderer.child.num_killed if isinstance(self._renderer, ChildRenderer) else 0
        return {
            "mesh_tokenizer_indexed_pages": float(self.routing.num_indexed_pages),
            "mesh_tokenizer_long_texts": float(self._prompts.num + self._counted.num),
            "mesh_tokenizer_templates_killed_total": float(num_killed),
            "mesh_tokenizer_ask_checks_killed_total": float(self._checks.num_killed),
        }

    def _load(self) -> tuple[ModelSpec, TextEncoder]:
        spec = describe_model(self._config.model)
        if not self._config.chat_template:
            require_template(spec)
        return spec, load_encoder(spec, self._config.context_length)

    def _make_renderer(self, template: str, special_tokens: dict[str, str]) -> Renderer:
        if self._config.use_processes:
            return ChildRenderer(template, special_tokens, self._encoder.max_chars, self._config.rendering)
        return InlineRenderer(template, special_tokens, self._encoder.max_chars)

    def _perform(self, command: Command) -> None:
        act = self.ctx.subscribe if isinstance(command, Follow) else self.ctx.unsubscribe
        act(command.scheduler, KV_EVENTS_TOPIC)
        act(command.scheduler, LOAD_TOPIC)

    def _on_prepare(self, call: Call, message: Prepare) -> None:
        if sum(field is not None for field in (message.chat, message.texts, message.token_ids)) != 1:
            raise InvalidRequest("exactly one of chat, texts and token_ids must be given")
        began, truncation = self.ctx.now(), Truncation(message.truncate_to, message.truncate_end)
        if message.checks and not self._checks.have_passed(message.checks):
            self.ctx.spawn(self._prepare_slowly(call, message, began), name=f"prepare {message.request_id}")
        elif message.token_ids is not None:
            self._reply_prepared(call, message, [*map(truncation.cut, message.token_ids)], "prompt", began)
        elif message.seconds is not None:
            self.ctx.spawn(self._prepare_pairs(call, message, began), name=f"prepare {message.request_id}")
        elif message.texts is not None and sum(map(len, message.texts)) <= self._config.inline_chars:
            encode = partial(self._encoder.encode, add_special_tokens=message.add_special_tokens, truncation=truncation)
            self._reply_prepared(call, message, [*map(encode, message.texts)], "prompt", began)
        else:
            self.ctx.spawn(self._prepare_slowly(call, message, began), name=f"prepare {message.request_id}")

    async def _prepare_slowly(self, call: Call, message: Prepare, began: float) -> None:
        try:
            await self._checks.check(message.checks)
            truncation = Truncation(message.truncate_to, message.truncate_end)
            if message.token_ids is not None:
                self._reply_prepared(call, message, [*map(truncation.cut, message.token_ids)], "prompt", began)
                return
            tail, render_s = "", 0.0
            if message.texts is not None:
                texts, param, special = message.texts, "prompt", message.add_special_tokens
            else:
                # Waiting for the one process that renders is part of it: a slow template holds up all chats.
                turn = self.ctx.now()
                texts, param, special = [await self._render(message)], "messages", message.chat_special_tokens
                tail, render_s = texts[0][-PROMPT_TAIL_CHARS:], self.ctx.now() - turn
            # A text that is cut may have any length.
            is_bounded = message.route and not message.truncate_to
            if is_bounded:
                for text in texts:
                    self._encoder.check_chars(text, param)
            encode = partial(self._encoder.encode, add_special_tokens=special, truncation=truncation)
            if sum(map(len, texts)) <= self._config.inline_chars:
                prompts = [encode(text) for text in texts]
            else:
                line = self._prompts if is_bounded else self._counted
                prompts = await line.encode(texts, encode, is_wanted=lambda: not call.done)
            if call.done:
                return
            if truncation.keeps_first and len(prompts[0]) == truncation.num_tokens:
                tail = ""
            self._reply_prepared(call, message, prompts, param, began, tail, render_s=render_s)
        except PrepareError as error:
            _fail(call, error)

    async def _prepare_pairs(self, call: Call, message: Prepare, began: float) -> None:
        firsts, seconds = message.texts or [], message.seconds or []
        encode = partial(
            self._encoder.encode_pair,
            add_special_tokens=message.add_special_tokens,
            after=message.after,
            truncation=Truncation(message.truncate_to, message.truncate_end),
        )
        try:
            if len(firsts) != len(seconds):
                raise InvalidRequest("there must be as many seconds as texts")
            pairs = [*zip(firsts, seconds, strict=True)]
            if sum(map(len, firsts)) + sum(map(len, seconds)) <= self._config.inline_chars:
                encoded = [encode(*pair) for pair in pairs]
            else:
                if not message.truncate_to:
                    for pair in pairs:
                        self._encoder.check_chars("".join(pair), "prompt")
                encoded = await self._prompts.encode(pairs, lambda pair: encode(*pair), lambda: not call.done)
            token_ids, starts = [pair.token_ids for pair in encoded], [pair.second_from for pair in encoded]
            self._reply_prepared(call, message, token_ids, "prompt", began, second_from=starts)
        except PrepareError as error:
            _fail(call, error)

    async def _render(self, message: Prepare) -> str:
        if self._renderer is None:
            raise TemplateError("this model has no chat template; send a prompt to /v1/completions", "messages")
        given = sum(map(len, filter(None, (message.chat, message.tools, message.chat_template_kwargs))))
        request = ChatRequest(
            # No context bounds a text whose tokens are only counted, or cut; templates make less than this of a chat.
            max_chars=0 if message.route and not message.truncate_to else 2 * given + _TEMPLATE_CHARS,
            chat=message.chat or b"",
            tools=message.tools,
            chat_template_kwargs=message.chat_template_kwargs,
            add_generation_prompt=message.add_generation_prompt,
            continue_final_message=message.continue_final_message,
            late_system_as_user=message.late_system_as_user,
        )
        try:
            return await self._renderer.render(request)
        except ContextLengthExceeded:
            # The renderer knows characters only; here the error can say how long the context is.
            raise self._encoder.too_many_chars("messages") from None

    def _reply_prepared(
        self,
        call: Call,
        message: Prepare,
        prompts: list[list[int]],
        param: str,
        began: float,
        tail: str = "",
        second_from: Sequence[int] = (),
        render_s: float = 0.0,
    ) -> None:
        if call.done:
            return
        routes: list[Route] = []
        for i, token_ids in enumerate(prompts):
            if not message.route:
                self._encoder.check_ids(token_ids, param)
                continue
            check = self._encoder.check_ids if VECTORS in message.asks else self._encoder.check_prompt
            check(token_ids, param)
            # Prompts of one request are independent of each other, so they are spread.
            request_id = message.request_id if len(prompts) == 1 else f"{message.request_id}/{i}"
            question = ChooseRoute(
                request_id=request_id,
                token_ids=token_ids,
                extra_key=message.extra_key,
                excluded=message.excluded,
                asks=message.asks,
            )
            routes.append(self._route(question))
        self.ctx.metrics.count("mesh_prompt_tokens_prepared_total", sum(map(len, prompts)))
        elapsed_s = self.ctx.now() - began
        self.ctx.metrics.observe("mesh_request_tokenize_seconds", elapsed_s)
        words = [self._encoder.encode(word, add_special_tokens=False) for word in message.words]
        prepared = Prepared(
            token_ids=prompts,
            routes=routes,
            elapsed_s=elapsed_s,
            words=words,
            prompt_tail=tail,
            second_from=list(second_from),
            render_s=render_s,
        )
        call.reply(prepared)

    def _on_ignored(self, what: str) -> None:
        self.ctx.log.info("a schema is not enforced entirely", ignored=what)

    def _route(self, ask: ChooseRoute) -> Route:
        return self.routing.choose(
            ask.request_id,
            ask.token_ids,
            ask.extra_key,
            frozenset(ask.excluded),
            self.ctx.now(),
            Bits(ask.weights, ask.numerics),
            ask.asks,
        )

    def _moves(self, ask: ChooseMoves) -> dict[str, Route]:
        for request in ask.requests:
            self._encoder.check_ids(request.token_ids, "prompt")
        return self.routing.choose_moves(ask, self.ctx.now())

    async def _describe_vocabulary(self, call: Call) -> None:
        # In the thread of texts that are only counted: 152,000 tokens take a third of a second, once.
        message, buffers = await self._counted.run(lambda: self._encoder.vocabulary)
        call.reply(message, buffers)

    async def _describe_tokenizer(self, call: Call) -> None:
        spec, context_length = self._spec, self._encoder.context_length
        try:
            # A file is read, whose disk may be slow.
            document = await self._counted.run(lambda: describe_tokenizer(spec, self._template, context_length))
        except ModelError as error:
            call.fail(error.code, error.message)
        else:
            call.reply(TokenizerIs(document=document))

    def _on_detokenize(self, call: Call, message: Detokenize) -> None:
        self._encoder.check_ids(message.token_ids, "tokens")
        text = self._encoder.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)
        call.reply(Detokenized(text=text))


def _fail(call: Call, error: PrepareError) -> None:
    call.fail(error.code, error.message, retryable=error.retryable, param=error.param)
