"""What an engine's users ask of it, from threads and loops of their own: calls of routes, and what comes of them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from nodes.engine.batches import Batch, Prompts, encodable
from nodes.engine.event_iterators import AsyncEventIterator, EventIterator
from nodes.engine.inside import Inside, Request
from nodes.engine.loop_thread import LoopThread
from nodes.engine.scores import Scoring, scoring_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.generate.surface import GENERATE

_ENCODE: Final = "/encode"
_SHARE: Final = 8
"""Of the room that one call may take at most, in prompts: fewer are divided because they are refused."""


class Asking:
    """The way into one engine. `check` raises EngineError where it cannot be used; so does everything here."""

    def __init__(self, thread: LoopThread, inside: Inside, check: Callable[[], object]) -> None:
        self._thread = thread
        self._inside = inside
        self._check = check

    @property
    def config(self) -> GatewayConfig:
        """Of its gateway."""
        self._check()
        return self._inside.seat.config

    def prompts(self, prompt: Any, input_ids: Any, fields: Mapping[str, Any]) -> Prompts:
        """Raises BadRequest."""
        return Prompts(prompt, input_ids, fields)

    def generating(
        self, prompt: Any, input_ids: Any, sampling_params: Any, fields: Mapping[str, Any], *, stream: bool
    ) -> tuple[Prompts, Iterable[Request]]:
        """Prompts, and the calls of `/generate` for them. Raises BadRequest."""
        prompts = Prompts(prompt, input_ids, {"sampling_params": sampling_params, "stream": stream, **fields})
        return prompts, self.of_prompts(prompts, stream=stream)

    def scoring(
        self, query: Any, items: Any, token_ids: Any, fields: Mapping[str, Any], *, softmax: bool, item_first: bool
    ) -> Scoring:
        """Raises BadRequest."""
        return scoring_of(query, items, token_ids, fields, softmax=softmax, item_first=item_first)

    def of_scores(self, scoring: Scoring) -> Iterable[Request]:
        """Calls of the route that scores, as `of_prompts`."""
        if scoring.prompts is None:
            return ()
        return self.of_prompts(scoring.prompts, path=scoring.path, num_beside=scoring.num_beside)

    def of_vectors(self, prompts: Prompts) -> Iterable[Request]:
        """Calls of `/encode`, as `of_prompts`."""
        return self.of_prompts(prompts, path=_ENCODE)

    def of_prompts(
        self, prompts: Prompts, *, path: str = GENERATE.path, stream: bool = False, num_beside: int = 0
    ) -> Iterable[Request]:
        """Calls of a route, each made when there is room for it and for `num_beside` more requests that it makes."""
        inside, most_samples = self._inside, self.config.max_samples_per_call
        is_indexed = stream and (prompts.is_list or prompts.num_samples_of(0) > 1)

        def request(batch: Batch) -> Request:
            first, last = batch.first_prompt, batch.first_prompt + batch.num_prompts - 1
            which = f"prompt {first}" if first == last else f"among prompts {first} to {last}"
            where = f"{which} of {len(prompts)}" if len(prompts) > 1 else ""
            parts = None if batch.num_prompts == 1 else lambda: map(request, prompts.one_by_one(batch))
            shown = _indexed(batch) if is_indexed else None
            return Request(path, batch.body, batch.num_samples + num_beside, shown, where, first, parts)

        # A streamed call begins with its first sample's text, and then cannot be made again if another one is refused.
        return map(request, prompts.batches(most_samples, lambda: 1 if stream else max(1, inside.room_now // _SHARE)))

    def of_chat(self, messages: Sequence[Mapping[str, Any]], stream: bool, fields: Mapping[str, Any]) -> list[Request]:
        """The call of a chat completion."""
        body = {"model": self.config.model_name, "messages": messages, **fields} | ({"stream": True} if stream else {})
        n = fields.get("n")
        data = msgspec.json.encode(body, enc_hook=encodable)
        return [Request(CHAT.path, data, n if isinstance(n, int) and n > 0 else 1)]

    def whole(self, requests: Iterable[Request]) -> list[Any]:
        """Answers, in order."""
        self._check()
        return self._thread.wait(self._inside.whole(requests))

    async def whole_later(self, requests: Iterable[Request]) -> list[Any]:
        """`whole` for coroutines."""
        self._check()
        return await asyncio.wrap_future(self._thread.begin(self._inside.whole(requests)))

    def stream(self, requests: Iterable[Request]) -> EventIterator:
        """Events of all, as they come."""
        self._check()
        return EventIterator(self._thread, self._thread.wait(self._inside.stream(requests)), self._check)

    async def stream_later(self, requests: Iterable[Request]) -> AsyncEventIterator:
        """`stream` for coroutines."""
        self._check()
        stream = await asyncio.wrap_future(self._thread.begin(self._inside.stream(requests)))
        return AsyncEventIterator(self._thread, stream, self._check)


def _indexed(batch: Batch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Events of a batch as they are in a stream of all."""
    return lambda event: event | {"index": batch.first_sample + event.get("index", 0)}
