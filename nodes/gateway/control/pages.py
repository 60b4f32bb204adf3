"""SGLang's routes beside /generate, by which trainers steer a server: aborts, caches, memory, and what is served.

`permission.py` says who may change what concerns everybody.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from nodes.gateway.control.aborts import Aborts
from nodes.gateway.control.cache import CacheControl
from nodes.gateway.control.info import Loads, WeightVersion, load_of, model_info, server_info, tokens_of
from nodes.gateway.control.load import load_of_mesh, whole_load
from nodes.gateway.control.memory import TAGS, MemoryControl
from nodes.gateway.control.permission import check_control, may_control
from nodes.gateway.errors import BadRequest, NotYet
from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.fields.openai_types import MAX_CLIENT_ID_CHARS
from nodes.gateway.http.call import Handler, HttpCall
from nodes.gateway.service import GatewayService
from nodes.protocol import AbortRequests
from nodes.protocol.memory import MemoryList

TEXT: Final = b"text/plain; charset=utf-8"
_ENCODE: Final = msgspec.json.Encoder().encode


class AbortBody(Struct, frozen=True, kw_only=True):
    """SGLang's `AbortReq`. Neither of the two, and a `rid` that nobody has, are no error: it may have ended."""

    rid: Annotated[str, Meta(max_length=MAX_CLIENT_ID_CHARS + 8)] | None = None
    abort_all: bool | None = None


class MemoryBody(Struct, frozen=True, kw_only=True):
    """What is to be released or resumed: `kv_cache`, `weights`; without any all of it."""

    tags: Annotated[list[str], Meta(max_length=16)] | None = None


class GroupState(Struct, frozen=True, kw_only=True):
    """One worker group, as `meshctl memory` lists it."""

    group: str
    state: str
    weights: str
    pool_bytes: int


class MemoryAnswer(Struct, frozen=True, kw_only=True):
    """All groups, once it is done; `note` says which hosts could not be asked."""

    groups: list[GroupState]
    note: str = ""


class Done(Struct, frozen=True, kw_only=True):
    """There is nothing to say: whether a request of that name was there is nobody else's business."""


NOT_YET: Final = frozenset({
    "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/update_weights_from_tensor",
    "/update_weights_from_distributed", "/update_weights_from_ipc", "/init_weights_update_group",
    "/destroy_weights_update_group", "/update_weight_version", "/pull_weights", "/post_process_weights",
    "/weights_checker", "/get_weights_by_name",
})  # fmt: skip
"""What trainers send to a server of SGLang in order to change its weights."""

_ABORT: Final = BodyReader(AbortBody)
_MEMORY: Final = BodyReader(MemoryBody)


def not_yet(path: str) -> NotYet:
    """The answer of one of these routes."""
    message = (
        f"'{path}' is not served: weights cannot be updated here yet, nor generation paused for it."
        " To serve other weights, start a mesh with them: `meshctl up --model DIRECTORY`."
    )
    return NotYet(message)


class ControlPages:
    """Handlers of these routes."""

    def __init__(self, service: GatewayService, version: str) -> None:
        ctx = service.ctx
        self._service = service
        self._config = service.config
        self._version = version
        self._aborts = Aborts(ctx, service)
        self._memory = MemoryControl(ctx, service.config, service.stopping)
        self._cache = CacheControl(ctx, service.config, self._memory)
        self.posts: dict[str, Handler] = {"/abort_request": self.abort_request}
        # Under the names that SGLang had for them, too.
        self.gets: dict[str, Handler] = {
            "/v1/loads": self.loads,
            "/get_load": self.load_in_tokens,
            "/get_model_info": self.model_info,
            "/model_info": self.model_info,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/get_weight_version": self.weight_version,
            "/weight_version": self.weight_version,
        }
        # SGLang takes both methods.
        self.either: dict[str, Handler] = {
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }

    async def abort_request(self, call: HttpCall) -> None:
        # Not counted as a call: a key that has all that it may have must be able to abort some of it.
        body: AbortBody = await self._read(call, _ABORT, b"")
        wish = AbortRequests(owner=call.names.key, rid=body.rid or "")
        if body.abort_all:
            wish = AbortRequests(owner=call.names.key, everybody=may_control(self._config, call.key))
            if call.key is None:
                check_control(self._config, call.key, "'abort_all' without an API key")
        if body.abort_all or body.rid:
            await self._aborts.everywhere(wish)
        await call.respond(200, _ENCODE(Done()))

    async def flush_cache(self, call: HttpCall) -> None:
        check_control(self._config, call.key, f"'{call.names.path}'")
        with self._entered(call):
            num_pages = await self._cache.flush()
        await call.respond(200, f"Cache flushed: {num_pages} pages are free now.\n".encode(), content_type=TEXT)

    async def release_memory(self, call: HttpCall) -> None:
        check_control(self._config, call.key, f"'{call.names.path}'")
        with self._entered(call):
            await self._answer_memory(call, await self._memory.release(await self._tags(call)))

    async def resume_memory(self, call: HttpCall) -> None:
        check_control(self._config, call.key, f"'{call.names.path}'")
        with self._entered(call):
            await self._answer_memory(call, await self._memory.resume(await self._tags(call)))

    async def model_info(self, call: HttpCall) -> None:
        await call.respond(200, _ENCODE(model_info(self._config)))

    async def weight_version(self, call: HttpCall) -> None:
        await call.respond(200, _ENCODE(WeightVersion()))

    async def server_info(self, call: HttpCall) -> None:
        load = await load_of_mesh(self._service.ctx, self._config)
        await call.respond(200, _ENCODE(server_info(self._config, self._service.members(), load, self._version)))

    async def loads(self, call: HttpCall) -> None:
        load = await whole_load(self._service.ctx, self._config)
        await call.respond(200, _ENCODE(Loads(loads=[load_of(load)])))

    async def load_in_tokens(self, call: HttpCall) -> None:
        # Of those that answer: to SGLang's router an error is a load of -1, by which it would send everything here.
        load = await load_of_mesh(self._service.ctx, self._config)
        await call.respond(200, _ENCODE([tokens_of(load)]))

    async def _answer_memory(self, call: HttpCall, found: MemoryList) -> None:
        groups = [
            GroupState(group=one.group, state=one.state, weights=one.weights, pool_bytes=one.pool_bytes)
            for one in found.groups
        ]
        await call.respond(200, _ENCODE(MemoryAnswer(groups=groups, note=found.note)))

    async def _tags(self, call: HttpCall) -> list[str]:
        body: MemoryBody = await self._read(call, _MEMORY, b"{}")
        for number, tag in enumerate(body.tags or ()):
            if tag not in TAGS:
                known = "', '".join(TAGS[:2])
                message = f"'{tag[:64]}' in 'tags' is unknown: this server knows '{known}'; leave it out for both."
                raise BadRequest(message, param=f"tags.{number}", code="invalid_value")
        return body.tags or []

    async def _read(self, call: HttpCall, reader: BodyReader, default: bytes) -> Any:
        decoded = reader.decode(await call.read_body() or default)
        call.observer.unknown_fields(decoded.unknown_fields, call.names.path)
        return decoded.body

    @contextmanager
    def _entered(self, call: HttpCall) -> Generator[None]:
        """A call that a drain waits for."""
        place = self._service.door.enter(call.client, call.key)
        try:
            yield
        finally:
            self._service.door.leave(place)
