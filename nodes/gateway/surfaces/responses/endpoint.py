"""/v1/responses: a call that may go on with a response that was kept, and whose own is kept before it ends."""

from typing import Final
from urllib.parse import parse_qs

import msgspec
from typing_extensions import override

from nodes.gateway.answers.surface import Answering
from nodes.gateway.calls.call import Call
from nodes.gateway.calls.completions import CompletionEndpoint
from nodes.gateway.errors import BadRequest, unsupported
from nodes.gateway.http.call import HttpCall
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.service import GatewayService
from nodes.gateway.surfaces.responses.answer import ResponseDeleted
from nodes.gateway.surfaces.responses.kept import Keeping, KeptResponses, NoSuchResponse, joined_items
from nodes.gateway.surfaces.responses.references import with_items
from nodes.gateway.surfaces.responses.surface import RESPONSES, ResponseStream, job_of
from nodes.gateway.surfaces.responses.translation import Asked, read, stored_items, translate

NO_STORE: Final = "This server keeps no responses; its operator can have it with `--responses-store BYTES`."


class ResponsesEndpoint(CompletionEndpoint):
    """The handler of POST. With `kept`, responses are, unless a call says otherwise."""

    def __init__(
        self, service: GatewayService, validator: Validator, kept: KeptResponses | None, *, fingerprint: str
    ) -> None:
        super().__init__(service, RESPONSES, validator, fingerprint=fingerprint)
        self._kept = kept

    @override
    async def _read(self, call: Call, body: bytes) -> Job:
        if self._kept is None:
            return await super()._read(call, body)
        owner = call.names.key
        asked = await with_items(read(body), self._kept, owner)
        history = await _history(self._kept, asked, owner)
        translated = translate(asked, stored_items(history))
        keeping = Keeping(self._kept, owner, joined_items(history, _items_of(asked))) if asked.keeps else None
        return job_of(asked, translated, self._validator, call.request_id, keeping)

    @override
    async def _whole(self, answering: Answering) -> bytes:
        stream = ResponseStream(answering)
        stream.whole()
        await stream.settle()
        return msgspec.json.encode(stream.response)


async def _history(kept: KeptResponses, asked: Asked, owner: str) -> bytes:
    previous = asked.body.previous_response_id
    if previous is None:
        return b"[]"
    try:
        return (await kept.read(previous, owner)).items
    except NoSuchResponse as error:
        message = f"Previous response with id '{previous[:64]}' not found."
        raise NoSuchResponse(message, param="previous_response_id", code="previous_response_not_found") from error


def _items_of(asked: Asked) -> bytes:
    if not isinstance(asked.body.input, str):
        return bytes(asked.fields["input"])
    said = [{"type": "message", "role": "user", "content": asked.body.input}] if asked.body.input else []
    return msgspec.json.encode(said)


class ResponsePages:
    """The handlers of /v1/responses/ID."""

    def __init__(self, kept: KeptResponses | None) -> None:
        self._kept = kept

    async def get(self, call: HttpCall) -> None:
        asked = parse_qs(call.query)
        for param, neutral in (("starting_after", None), ("stream", "false")):
            if asked.get(param, [neutral]) != [neutral]:
                message = f"'{param}' is not supported by this server: streams are read by those who asked for them."
                raise unsupported(message, param)
        found = await self._those_kept().read(call.path_param, call.names.key)
        await call.respond(200, found.response)

    async def delete(self, call: HttpCall) -> None:
        response_id = call.path_param
        await self._those_kept().delete(response_id, call.names.key)
        await call.respond(200, msgspec.json.encode(ResponseDeleted(id=response_id)))

    async def cancel(self, call: HttpCall) -> None:
        await self._those_kept().read(call.path_param, call.names.key)
        message = "Only responses of the background can be cancelled, which this server has none of: hang up instead."
        raise BadRequest(message, param="response_id", code="not_in_background")

    def _those_kept(self) -> KeptResponses:
        if self._kept is None:
            raise NoSuchResponse(NO_STORE, param="response_id")
        return self._kept
