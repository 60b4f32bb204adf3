"""`Engine`: a whole mesh without HTTP, for scripts and notebooks: `from nodes import Engine`.

    program's thread --> Engine --> its thread: loop, gateway, request log --ZeroMQ--> the mesh's other roles
                                       `--exec, and a pipe--> supervisor --> their processes

Names, arguments and answers of `generate` are those of SGLang's Engine and of `POST /generate`, of `chat` those of
OpenAI's chat completions: bodies go to the very routes of a gateway (`nodes/gateway/surfaces`).
"""

import asyncio
import atexit
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from secrets import token_hex
from typing import Any, Final, NoReturn, Self, cast

import msgspec

from mesh.run import unsupervised
from nodes.engine.batches import Batch, Prompts, encodable
from nodes.engine.errors import EngineClosed, WrongProcess
from nodes.engine.inside import Inside, Request
from nodes.engine.loop_thread import LoopThread
from nodes.engine.startup import AttachTo, StartMesh, Wish
from nodes.engine.streams import AsyncEventIterator, EventIterator
from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.chat import CHAT
from nodes.gateway.surfaces.generate.surface import GENERATE

_SHARE: Final = 8
"""Of the room that one call may take at most, in prompts: fewer are divided because they are refused."""
_opened: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """One mesh of this process, or a seat in one that runs. Usable from any thread and any event loop; with `with`.

    Args:
        model: as `meshctl up --model`: `tiny`, `echo`, `random:ARCH`, a directory, or ORG/NAME[@REVISION].
        file: a topology file, of a mesh on one host.
        settings: options of `meshctl up` by their names, such as `mixed=1`, `kv_memory="1GiB"`, `device="cuda"`; also
            `roles={"scheduler": {"policy": "priority"}}` and other tables of a topology file.

    Raises StartFailed; then nothing is left running. Requests raise `ApiError` (`nodes/gateway/errors.py`) for what is
    wrong with them, `EngineError` where the engine cannot be used.
    """

    def __init__(
        self, model: str | None = None, *, file: str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        if model is not None:
            settings["model"] = model
        gateway, epoch = _incarnation()
        self._begin(
            StartMesh(
                mesh=f"engine-{token_hex(6)}",
                gateway=gateway,
                epoch=epoch,
                settings={name: value for name, value in settings.items() if value is not None},
                file="" if file is None else os.path.abspath(file),
            )
        )

    @classmethod
    def attach(cls, name: str) -> Self:
        """Join the running mesh of this name, of this user on this host, as one more gateway. Raises StartFailed.

        It goes on without this engine, and serves others meanwhile.
        """
        self = cls.__new__(cls)
        gateway, epoch = _incarnation()
        self._begin(AttachTo(mesh=name, gateway=gateway, epoch=epoch))
        return self

    def _begin(self, wish: Wish) -> None:
        self.name = wish.mesh
        """The mesh's, for `meshctl ps --name` and `Engine.attach`."""
        self._pid = os.getpid()
        self._is_closed = False
        self._thread = LoopThread(wish.gateway)
        try:
            self._inside = self._thread.wait(_started(wish))
        except BaseException:
            # Also Ctrl-C.
            self._thread.stop()
            raise
        _opened.add(self)
        weakref.finalize(self, _forgotten, self._thread, self._inside).atexit = False

    @property
    def config(self) -> GatewayConfig:
        """What is served: `model_name`, `context_length`, `sampling_defaults` and more."""
        self._check()
        return self._inside.seat.config

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Answer one prompt, or any number of them, which are fed to the mesh as there is room.

        Returns what `POST /generate` answers: a dict for one prompt, a list of them for a list, or for `n` in
        `sampling_params`. With `stream` an iterator of dicts, each with all of its text so far, and with `index` if
        there are several. `fields` are the route's others: `return_logprob`, `logprob_start_len`, `top_logprobs_num`,
        `token_ids_logprob`, `rid` and more. These and `sampling_params` may be lists with an entry for each prompt.
        """
        prompts = Prompts(prompt, input_ids, {"sampling_params": sampling_params, "stream": stream, **fields})
        requests = self._requests(prompts, stream=stream)
        return self._stream(requests) if stream else _shown(prompts, self._whole(requests))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for coroutines; with `stream` what it returns is read by `async for`."""
        prompts = Prompts(prompt, input_ids, {"sampling_params": sampling_params, "stream": stream, **fields})
        requests = self._requests(prompts, stream=stream)
        if stream:
            return await self._async_stream(requests)
        return _shown(prompts, await self._async_whole(requests))

    def chat(self, messages: Sequence[dict[str, Any]], *, stream: bool = False, **fields: Any) -> Any:
        """A chat completion, as `POST /v1/chat/completions` answers it, whose other fields are `fields`.

        With `stream` an iterator of its chunks.
        """
        request = self._chat(messages, stream, fields)
        return self._stream(request) if stream else self._whole(request)[0]

    async def async_chat(self, messages: Sequence[dict[str, Any]], *, stream: bool = False, **fields: Any) -> Any:
        """`chat` for coroutines; with `stream` what it returns is read by `async for`."""
        request = self._chat(messages, stream, fields)
        return await self._async_stream(request) if stream else (await self._async_whole(request))[0]

    def close(self) -> None:
        """End what runs, with EngineClosed, and the mesh if it is this engine's own. Idempotent."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        _opened.discard(self)
        try:
            self._thread.wait(self._inside.stop())
        finally:
            self._thread.stop()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise WrongProcess(
            f"an engine cannot be copied or sent to another process: make one there, or `Engine.attach({self.name!r})`"
        )

    def _requests(self, prompts: Prompts, *, stream: bool) -> Iterator[Request]:
        self._check()
        inside = self._inside
        is_indexed = stream and (prompts.is_list or prompts.num_samples_of(0) > 1)

        def request(batch: Batch) -> Request:
            first, last = batch.first_prompt, batch.first_prompt + batch.num_prompts - 1
            which = f"prompt {first}" if first == last else f"among prompts {first} to {last}"
            where = f"{which} of {len(prompts)}" if len(prompts) > 1 else ""
            parts = None if batch.num_prompts == 1 else lambda: map(request, prompts.one_by_one(batch))
            shown = _indexed(batch) if is_indexed else None
            return Request(GENERATE.path, batch.body, batch.num_samples, shown, where, parts)

        most_samples = inside.seat.config.max_samples_per_call
        return map(request, prompts.batches(most_samples, lambda: max(1, inside.room_now // _SHARE)))

    def _chat(self, messages: Sequence[dict[str, Any]], stream: bool, fields: dict[str, Any]) -> list[Request]:
        self._check()
        body = {"model": self._inside.seat.config.model_name, "messages": messages, **fields}
        if stream:
            body["stream"] = True
        n = fields.get("n")
        return [
            Request(CHAT.path, msgspec.json.encode(body, enc_hook=encodable), n if isinstance(n, int) and n > 0 else 1)
        ]

    def _whole(self, requests: Iterator[Request] | list[Request]) -> list[Any]:
        self._check()
        return self._thread.wait(self._inside.whole(requests))

    async def _async_whole(self, requests: Iterator[Request] | list[Request]) -> list[Any]:
        self._check()
        return await asyncio.wrap_future(self._thread.begin(self._inside.whole(requests)))

    def _stream(self, requests: Iterator[Request] | list[Request]) -> EventIterator:
        self._check()
        return EventIterator(self._thread, self._thread.wait(self._inside.stream(requests)), self._check)

    async def _async_stream(self, requests: Iterator[Request] | list[Request]) -> AsyncEventIterator:
        self._check()
        stream = await asyncio.wrap_future(self._thread.begin(self._inside.stream(requests)))
        return AsyncEventIterator(self._thread, stream, self._check)

    def _check(self) -> None:
        """Raises EngineClosed, WrongProcess."""
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"this engine belongs to process {self._pid}, from which this one was forked: make one after the fork, "
                f"or `Engine.attach({self.name!r})`"
            )
        if self._is_closed:
            raise EngineClosed("this engine is closed: make another one")


def _incarnation() -> tuple[str, int]:
    return unsupervised(f"engine-{token_hex(3)}")


async def _started(wish: Wish) -> Inside:
    inside = Inside(wish)
    await inside.start()
    return inside


def _shown(prompts: Prompts, answers: list[Any]) -> Any:
    if not prompts.is_list:
        return answers[0]
    # A call of one prompt and one sample is answered with that alone.
    each = (cast("list[Any]", answer) if isinstance(answer, list) else [answer] for answer in answers)
    return list(chain.from_iterable(each))


def _indexed(batch: Batch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Events of a batch as they are in a stream of all."""
    return lambda event: event | {"index": batch.first_sample + event.get("index", 0)}


def _forgotten(thread: LoopThread, inside: Inside) -> None:
    # In whatever thread that is, its own too: nothing is waited for.
    thread.stop_after(inside.stop)


@atexit.register
def _close_all() -> None:
    # Before the interpreter goes, in which a thread could not go on.
    for engine in list(_opened):
        engine.close()
