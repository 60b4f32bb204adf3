"""Responses that are kept: on this host in a file, on others by way of their gateways."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from mesh.actor import Answer, Call, Context
from mesh.address import host_of
from mesh.errors import CallError
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest, Unavailable
from nodes.gateway.surfaces.responses.answer import RESPONSE_ID_PREFIX, Response
from nodes.gateway.surfaces.responses.store import ResponseStore, StoredResponse, StoreUnusable
from nodes.protocol import ReadResponse, ResponseIs
from nodes.roles import GATEWAY

_ID: Final = re.compile(rf"{RESPONSE_ID_PREFIX}[0-9a-f]{{32}}(?:_(?P<host>[a-z0-9-]{{1,12}}))?")
_ASK_S: Final = 7.0
"""Longer than the store waits for its lock (5 s): then its gateway says what is wrong."""
_Done = TypeVar("_Done")


class NoSuchResponse(BadRequest, status=404, code="response_not_found"):
    """Nobody has it: it was not stored, is too old, was deleted, is another key's, or its host is gone."""


class KeptResponses:
    """What this gateway stores and finds. `owner` is always the name of an API key, empty without keys."""

    def __init__(self, ctx: Context, config: GatewayConfig) -> None:
        self._ctx = ctx
        ctx.metrics.begin("mesh_responses_not_stored_total")
        self._host = host_of(ctx.address.actor_id)
        self._retry_after_s = config.retry_after_s
        self._store = ResponseStore(Path(config.responses_file), config.responses_store_bytes)
        # One, as SQLite wants it; what waits for it is bounded by the calls that may be in flight.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    def name(self, request_id: str) -> str:
        """The id of the response to a request: it says which host has it."""
        return f"{request_id}_{self._host}" if self._host else request_id

    async def keep(self, owner: str, response: Response, items: bytes) -> bool:
        """Whether it is stored; if not, the log says why, and the answer is as good without."""
        try:
            await self._run(lambda: self._store.put(response.id, owner, StoredResponse(_ENCODE(response), items)))
        except StoreUnusable as error:
            self._ctx.metrics.count("mesh_responses_not_stored_total")
            self._ctx.log.warning("response_not_stored", response_id=response.id, error=str(error))
            return False
        return True

    async def read(self, response_id: str, owner: str) -> StoredResponse:
        """Raises `ApiError`: 404, or 503 where the store cannot be used."""
        answer = await self._ask(ReadResponse(response_id=response_id, owner=owner))
        if not isinstance(answer, StoredResponse):
            raise _missing(response_id)
        return answer

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises `ApiError` as `read` does."""
        if not await self._ask(ReadResponse(response_id=response_id, owner=owner, delete=True)):
            raise _missing(response_id)

    async def answer(self, call: Call, message: ReadResponse) -> None:
        """What a gateway of another host asks."""
        try:
            found = await self._run(lambda: self._local(message))
        except StoreUnusable as error:
            call.fail("store_unusable", str(error), retryable=True)
            return
        call.reply(ResponseIs(is_there=bool(found)), found if isinstance(found, StoredResponse) else ())

    def close(self) -> None:
        # Not waited for: what is being written is written, and the file is whole whatever happens.
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=False)

    def _local(self, message: ReadResponse) -> StoredResponse | bool:
        if message.delete:
            return self._store.delete(message.response_id, message.owner)
        return self._store.get(message.response_id, message.owner) or False

    async def _ask(self, message: ReadResponse) -> StoredResponse | bool:
        found = _ID.fullmatch(message.response_id)
        host = (found["host"] or "") if found else None
        if host == self._host:
            try:
                return await self._run(lambda: self._local(message))
            except StoreUnusable as error:
                raise self._unusable(str(error)) from error
        # The id names its host, so nobody else is asked: with a hundred gateways a wrong id costs no ask at all.
        there = [member.actor_id for member in self._ctx.members.by_role(GATEWAY) if host_of(member.actor_id) == host]
        failure: CallError | None = None
        for gateway in there:
            try:
                return _found(await self._ctx.ask(gateway, message, timeout_s=_ASK_S))
            except CallError as error:
                # The file is its host's: another gateway there may have it as well.
                failure = error
        if failure is not None:
            raise self._unusable(failure.message) from failure
        return False

    def _unusable(self, why: str) -> ApiError:
        message = f"The store of responses cannot be used: {why}"
        return Unavailable(message, code="store_unusable", retry_after_s=self._retry_after_s)

    async def _run(self, work: Callable[[], _Done]) -> _Done:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_ENCODE: Final = msgspec.json.Encoder().encode


def _missing(response_id: str) -> NoSuchResponse:
    return NoSuchResponse(f"No response with the id '{response_id[:64]}' is stored here.", param="response_id")


def _found(answer: Answer) -> StoredResponse | bool:
    is_there = isinstance(answer.message, ResponseIs) and answer.message.is_there
    return StoredResponse(*map(bytes, answer.buffers)) if len(answer.buffers) == 2 and is_there else is_there


class Keeping(NamedTuple):
    """One response that is to be kept: whose it is, and the conversation before it as a JSON list of items."""

    kept: KeptResponses
    owner: str
    items: bytes

    async def keep(self, response: Response) -> Response:
        """The response as it is answered: it says whether it is stored."""
        items = joined_items(self.items, _ENCODE(response.output))
        return replace(response, store=await self.kept.keep(self.owner, response, items))


def joined_items(*lists: bytes) -> bytes:
    """JSON lists as one, without a look into them."""
    return b"[" + b",".join(inside for one in lists if (inside := one.strip()[1:-1].strip())) + b"]"
