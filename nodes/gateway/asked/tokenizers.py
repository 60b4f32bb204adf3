"""What a gateway asks of tokenizers: ids and routes of prompts, text of ids, other places, facts of the model.

Any tokenizer can answer, so an ask outlives the one that it went to (`PersistentAsk`). Owned by the service; all calls
are made on the event loop's thread.
"""

import contextlib
from collections.abc import Sequence
from typing import Final

from mesh.actor import Answer, Context
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError
from nodes.gateway.asked.answer_form import form_of
from nodes.gateway.asked.asked_once import AskedOnce
from nodes.gateway.asked.vocabulary import vocabulary_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Internal, error_from
from nodes.gateway.requests.events import AskMove, AskRoute, Failure, MoveChosen, RouteChosen, RouteFailed
from nodes.protocol import (
    ChooseMoves,
    ChooseRoute,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    MovesChosen,
    Prepare,
    Prepared,
    Route,
    TokenizerIs,
)
from nodes.roles import TOKENIZER
from nodes.trace_notes import Noted

ROUTE_TIMEOUT_S: Final = 2.0
"""Less than a hung tokenizer takes to be killed (2.5 s: three heartbeats and 1 s), so another is asked before that."""


class Tokenizers:
    """Asks one tokenizer after the other until there is an answer. `vocabulary`, `form` and `info` are asked once."""

    def __init__(self, ctx: Context, config: GatewayConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._asks = PersistentAsk()
        self.vocabulary = AskedOnce(lambda: self._ask(DescribeVocabulary(), "logprobs"), vocabulary_of)
        self.form = AskedOnce(lambda: self._ask(DescribeTemplate(), "messages"), lambda answer: form_of(answer, config))
        self.info = AskedOnce(lambda: self._ask(DescribeTokenizer(), ""), _document_of)

    def members_changed(self) -> None:
        """Ask again what waits for a tokenizer to be there."""
        self._asks.members_changed()

    async def prepare(self, question: Prepare, *, prompt_param: str) -> Prepared:
        """Token ids and routes; raises `ApiError`."""
        note, name = self._ctx.trace.note, question.request_id
        note(Noted.PREPARING, name, _num_prompts(question))
        answer = (await self._ask(question, prompt_param)).message
        if not isinstance(answer, Prepared) or not _fits(question, answer):
            raise _unfitting()
        note(Noted.PREPARED, name, sum(map(len, answer.token_ids)), int(answer.elapsed_s * 1e6))
        return answer

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; raises `ApiError`."""
        question = Detokenize(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        answer = (await self._ask(question, "tokens")).message
        if not isinstance(answer, Detokenized):
            raise _unfitting()
        return answer.text

    async def choose_route(self, command: AskRoute) -> RouteChosen | RouteFailed:
        """Where a request that has lost its scheduler goes on."""
        note, request_id = self._ctx.trace.note, command.message.request_id
        note(Noted.ROUTING, request_id, command.attempt)
        try:
            answer = (await self._ask_now(command.message)).message
        except CallError as error:
            note(Noted.ROUTED, request_id, command.attempt)
            failure = Failure(error.code, error.message, error.retryable, error.param)
            return RouteFailed(request_id, command.attempt, failure)
        note(Noted.ROUTED, request_id, command.attempt, isinstance(answer, Route))
        if isinstance(answer, Route):
            return RouteChosen(request_id, command.attempt, answer)
        failure = Failure("bad_answer", "a tokenizer gave an answer that does not match the request")
        return RouteFailed(request_id, command.attempt, failure)

    async def choose_moves(self, asked: Sequence[AskMove]) -> list[MoveChosen]:
        """Other places for requests of one group. Those for which there is no answer stay, and lose nothing by it."""
        note, holder = self._ctx.trace.note, asked[0].holder
        for one in asked:
            note(Noted.ROUTING, one.message.request_id, one.attempt)
        # They were gathered in one turn of the loop: the least time is right for all, and moves none in vain.
        returns_in_s = min(one.returns_in_s for one in asked)
        requests = [one.message for one in asked]
        routes: dict[str, Route] = {}
        with contextlib.suppress(CallError):
            question = ChooseMoves(holder=holder, returns_in_s=returns_in_s, requests=requests)
            answer = await self._ask_now(question)
            routes = answer.message.routes if isinstance(answer.message, MovesChosen) else routes
        chosen: list[MoveChosen] = []
        for one in asked:
            request_id = one.message.request_id
            note(Noted.ROUTED, request_id, one.attempt, request_id in routes)
            if (route := routes.get(request_id)) is not None:
                chosen.append(MoveChosen(request_id, one.attempt, holder, route))
        return chosen

    async def _ask(
        self, question: Prepare | Detokenize | DescribeVocabulary | DescribeTemplate | DescribeTokenizer, param: str
    ) -> Answer:
        """For a client, who waits for a tokenizer if there is none. Raises `ApiError`."""
        timeout_s, patience_s = self._config.prepare_timeout_s, self._config.role_wait_s
        try:
            return await self._asks.ask_any(self._ctx, TOKENIZER, question, timeout_s=timeout_s, patience_s=patience_s)
        except CallError as error:
            failure = Failure(error.code, error.message, error.retryable, error.param)
            raise error_from(failure, retry_after_s=self._config.retry_after_s, default_param=param) from error

    async def _ask_now(self, question: ChooseRoute | ChooseMoves) -> Answer:
        """For the core, which asks again by itself. Raises CallError."""
        return await self._asks.ask_any(self._ctx, TOKENIZER, question, timeout_s=ROUTE_TIMEOUT_S, patience_s=0.0)


def _num_prompts(question: Prepare) -> int:
    return len(question.texts or question.token_ids or [None])


def _fits(question: Prepare, answer: Prepared) -> bool:
    """Whether there is something for all that was asked."""
    num_prompts = _num_prompts(question)
    due = (num_prompts, num_prompts if question.route else 0, len(question.words), len(question.seconds or ()))
    return due == tuple(map(len, (answer.token_ids, answer.routes, answer.words, answer.second_from)))


def _document_of(answer: Answer) -> bytes:
    if not isinstance(answer.message, TokenizerIs):
        raise _unfitting()
    return answer.message.document


def _unfitting() -> Internal:
    return Internal("A tokenizer gave an answer that does not match the request.")
