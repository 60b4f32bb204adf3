"""What an engine's users ask of it, from threads and loops of their own: calls of routes, and what comes of them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from nodes.engine.batches import Batch, Prompts, encodable
from nodes.engine.event_iterators import AsyncEventIterator, EventIterator
from nodes.engine.inside import Inside, Request
from nodes.engine.loop_thread import LoopThread
from nodes.engine.scores import Scoring
from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.generate.surface import GENERATE

_ENCODE: Final = "/encode"
_SHARE: Final = 8
"""Of the room that one call may take at most, in prompts: fewer are divided because they are refused."""


class Asked(NamedTuple):
    """What a method asks: calls of routes, and what it makes of their answers. `stream`: as they come, unchanged."""

    asking: "Asking"
    requests: Iterable[Request]
    of: Callable[[list[Any]], Any]
    stream: bool = False


class Asking:
    """The way into one engine. `check` raises EngineError where it cannot be used; so does everything here.

    Methods whose names are those of the engine's raise BadRequest.
    """

    def __init__(self, thread: LoopThread, inside: Inside, check: Callable[[], object]) -> None:
        self._thread = thread
        self._inside = inside
        self._check = check

    @property
    def config(self) -> GatewayConfig:
        """Of its gateway."""
        self._check()
        return self._inside.seat.config

    def generate(
        self, prompt: Any, input_ids: Any, sampling_params: Any, fields: Mapping[str, Any], *, stream: bool
    ) -> Asked:
        prompts = Prompts(prompt, input_ids, {"sampling_params": sampling_params, "stream": stream, **fields})
        return Asked(self, self._of_prompts(prompts, stream=stream), prompts.of_each, stream)

    def chat(self, messages: Sequence[Mapping[str, Any]], stream: bool, fields: Mapping[str, Any]) -> Asked:
        body = {"model": self.config.model_name, "messages": messages, **fields} | ({"stream": True} if stream else {})
        n = fields.get("n")
        data = msgspec.json.encode(body, enc_hook=encodable)
        return Asked(self, [Request(CHAT.path, data, n if isinstance(n, int) and n > 0 else 1)], _only, stream)

    def encode(self, prompt: Any, input_ids: Any, fields: Mapping[str, Any]) -> Asked:
        prompts = Prompts(prompt, input_ids, fields)
        return Asked(self, self._of_prompts(prompts, path=_ENCODE), prompts.of_each)

    def score(self, scoring: Scoring) -> Asked:
        prompts = scoring.prompts
        if prompts is None:
            return Asked(self, (), scoring.scores)
        return Asked(self, self._of_prompts(prompts, path=scoring.path, num_beside=scoring.num_beside), scoring.scores)

    def now(self, asked: Asked) -> Any:
        """What comes of it, in the thread that calls this; of a stream an iterator."""
        self._check()
        if asked.stream:
            return EventIterator(self._thread, self._thread.wait(self._inside.stream(asked.requests)), self._check)
        return asked.of(self._thread.wait(self._inside.whole(asked.requests)))

    async def later(self, asked: Asked) -> Any:
        """`now` for coroutines."""
        self._check()
        if asked.stream:
            stream = await asyncio.wrap_future(self._thread.begin(self._inside.stream(asked.requests)))
            return AsyncEventIterator(self._thread, stream, self._check)
        return asked.of(await asyncio.wrap_future(self._thread.begin(self._inside.whole(asked.requests))))

    def _of_prompts(
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


def _indexed(batch: Batch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Events of a batch as they are in a stream of all."""
    return lambda event: event | {"index": batch.first_sample + event.get("index", 0)}


def _only(answers: list[Any]) -> Any:
    return answers[0]
