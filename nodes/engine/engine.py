"""`Engine`: a whole mesh without HTTP, for scripts and notebooks: `from nodes import Engine`.

    program's thread --> Engine --> its thread: loop, gateway, request log --ZeroMQ--> the mesh's other roles
                                       `--exec, and a pipe--> supervisor --> their processes

Names, arguments and answers of `generate`, `encode` and `score` are those of SGLang's Engine and of `POST /generate`,
`/encode` and `/score`, of `chat` those of OpenAI's chat completions: bodies go to the very routes of a gateway
(`nodes/gateway/surfaces`).
"""

import atexit
import functools
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self

from nodes.engine.errors import EngineClosed, WrongProcess
from nodes.engine.launch import Launched
from nodes.engine.startup import AttachTo, StartMesh, Wish

if TYPE_CHECKING:
    from nodes.engine.asking import Asked
    from nodes.engine.inside import Inside
    from nodes.engine.loop_thread import LoopThread
    from nodes.gateway.config import GatewayConfig

Arguments = ParamSpec("Arguments")

_opened: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _asked(
    method: "Callable[Concatenate[Engine, Arguments], Asked]",
) -> "tuple[Callable[Concatenate[Engine, Arguments], Any], Callable[Concatenate[Engine, Arguments], Awaitable[Any]]]":
    """Two public methods of one that says what is asked: one that waits, and `async_NAME` for coroutines.

    With `stream` what the second returns is read by `async for`.
    """

    @functools.wraps(method)
    def now(engine: "Engine", /, *args: Arguments.args, **fields: Arguments.kwargs) -> Any:
        asked = method(engine, *args, **fields)
        return asked.asking.now(asked)

    @functools.wraps(method)
    async def later(engine: "Engine", /, *args: Arguments.args, **fields: Arguments.kwargs) -> Any:
        asked = method(engine, *args, **fields)
        return await asked.asking.later(asked)

    now.__name__ = method.__name__.removeprefix("_")
    later.__name__ = f"async{method.__name__}"
    for made in (now, later):
        made.__qualname__ = f"Engine.{made.__name__}"
    return now, later


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
        launched = Launched(wish)
        # Imported only now, while that process imports its own: both take the better part of a second.
        from nodes.engine.asking import Asking
        from nodes.engine.inside import started
        from nodes.engine.loop_thread import LoopThread

        self._thread = LoopThread(wish.gateway)
        try:
            self._inside = self._thread.wait(started(wish, launched))
        except BaseException:
            # Also Ctrl-C.
            launched.let_go()
            self._thread.stop()
            raise
        self._asking = Asking(self._thread, self._inside, self._check)
        _opened.add(self)
        weakref.finalize(self, _forgotten, self._thread, self._inside).atexit = False

    @property
    def config(self) -> "GatewayConfig":
        """What is served: `model_name`, `context_length`, `sampling_defaults` and more."""
        return self._asking.config

    def _generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> "Asked":
        """Answer one prompt, or any number of them, which are fed to the mesh as there is room.

        Returns what `POST /generate` answers: a dict for one prompt, a list of them for a list, or for `n` in
        `sampling_params`. With `stream` an iterator of dicts, each with all of its text so far, and with `index` if
        there are several. `fields` are the route's others: `return_logprob`, `logprob_start_len`, `top_logprobs_num`,
        `token_ids_logprob`, `rid` and more. These and `sampling_params` may be lists with an entry for each prompt.
        """
        return self._asking.generate(prompt, input_ids, sampling_params, fields, stream=stream)

    generate, async_generate = _asked(_generate)

    def _chat(self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **fields: Any) -> "Asked":
        """A chat completion, as `POST /v1/chat/completions` answers it, whose other fields are `fields`.

        With `stream` an iterator of its chunks.
        """
        return self._asking.chat(messages, stream, fields)

    chat, async_chat = _asked(_chat)

    def _encode(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        dimensions: int | None = None,
        **fields: Any,
    ) -> "Asked":
        """The vector of one prompt, or of each of any number of them, for models that give vectors or scores.

        Returns what `POST /encode` answers: a dict with `embedding` and `meta_info` for one prompt, a list of them for
        a list. `dimensions`: the first so many numbers. `fields` are the route's others: `normalize`, `prompt_name`,
        `truncate_prompt_tokens`, `rid` and more.
        """
        return self._asking.encode(prompt, input_ids, {"dimensions": dimensions, **fields})

    encode, async_encode = _asked(_encode)

    def _score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **fields: Any,
    ) -> "Asked":
        """Score any number of items, each with the query.

        With `label_token_ids`, of a model that generates: a list for each item, with the probability of each of these
        tokens to come right after query and item, or with `item_first` after item and query; with `apply_softmax` they
        add up to 1. Texts are joined as they are, without a template; ids may be given in their place.

        Without, of a model that gives vectors or scores: a float for each item, as `POST /score` answers.
        `fields` are others of `/generate` or `/score`.
        """
        # As at `_begin`: only once there is an engine.
        from nodes.engine.scores import scoring_of

        return self._asking.score(
            scoring_of(query, items, label_token_ids, fields, softmax=apply_softmax, item_first=item_first)
        )

    score, async_score = _asked(_score)

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
    # As of any actor that no supervisor starts (`mesh.run.unsupervised`).
    return f"engine-{token_hex(3)}", time.time_ns() // 1_000_000


def _forgotten(thread: "LoopThread", inside: "Inside") -> None:
    # In whatever thread that is, its own too: nothing is waited for.
    thread.stop_after(inside.stop)


@atexit.register
def _close_all() -> None:
    # Before the interpreter goes, in which a thread could not go on.
    for engine in list(_opened):
        engine.close()
