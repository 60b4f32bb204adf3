"""The health routes: whether the event loop runs, whether a request could be served, and whether one is.

The names of routes are those that probes of other servers use by default; `app.py` has the list.
"""

import asyncio
from uuid import uuid4

import msgspec

from nodes.gateway.admission.in_flight import Place
from nodes.gateway.clients import HEALTH
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.openai_types import Readiness
from nodes.gateway.http.call import HttpCall
from nodes.gateway.jobs.validation import Validator
from nodes.gateway.service import GatewayService

# Shorter than a page, so that no cache keeps it; a model that would end at once still has to give its one token.
_PROBE = b'{"prompt": "health", "max_tokens": 1, "temperature": 0, "ignore_eos": true}'


class HealthPages:
    """Handlers of the health routes."""

    def __init__(self, service: GatewayService, validator: Validator) -> None:
        self._service = service
        self._config = service.config
        self._validator = validator

    async def live(self, call: HttpCall) -> None:
        await call.respond(200, msgspec.json.encode(Readiness()))

    async def ready(self, call: HttpCall) -> None:
        await self._answer(call, self._service.missing_roles())

    async def generate(self, call: HttpCall) -> None:
        await self._answer(call, self._service.missing_roles() or await self._what_hinders())

    async def _what_hinders(self) -> list[str]:
        timeout_s = self._config.health_timeout_s
        try:
            place = self._service.door.enter(HEALTH)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._generate(place)
            finally:
                self._service.door.leave(place)
        except TimeoutError:
            return [f"no token came within {timeout_s:g} s"]
        except ApiError as error:
            return [error.message]

    async def _generate(self, place: Place) -> list[str]:
        job = self._validator.probe(_PROBE, f"health-{uuid4().hex}")
        prepared = await self._service.tokenizers.prepare(job.prepare, prompt_param=job.prompt_param)
        generation = self._service.open(job, prepared, self._service.now(), place=place)
        try:
            output = generation.output
            while not output.is_finished:
                await output.wait()
            if output.failure is not None:
                return [output.failure.message or output.failure.code]
            first = output.samples[0]
            return [] if first.num_tokens or first.vector else ["a request ended without a token"]
        finally:
            self._service.abandon(generation, place)

    async def _answer(self, call: HttpCall, reasons: list[str]) -> None:
        if not reasons:
            await call.respond(200, msgspec.json.encode(Readiness()))
            return
        body = msgspec.json.encode(Readiness(status="not_ready", reasons=reasons))
        retry_after = (b"retry-after", b"%d" % self._config.retry_after_s)
        await call.respond(503, body, headers=[retry_after])
