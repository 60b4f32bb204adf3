"""Which calls a gateway takes: within its own limits and those of keys, and none while it drains.

Counted are calls when they come, before their bodies are read, and requests (samples) when they are opened. Who is
refused when there is no room is decided by `in_flight.py`. Pure but for the wait for the last call.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from nodes.api_keys.entries import ApiKey
from nodes.gateway.admission.in_flight import InFlight, Place
from nodes.gateway.admission.key_use import KeyUse
from nodes.gateway.clients import NOBODY, Client
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import TooManyRequests, Unavailable
from nodes.gateway.requests.events import Evicted, Failure
from nodes.protocol.attempts import OVER_SHARE

RESERVE: Final = 16
"""One part in so many more than `max_inflight` is for first calls of clients, if all others are being answered and none
can give way any more."""


class Door:
    """Calls and requests that are in, by client and key.

    Args:
        config: whose limits hold.
        num_gateways: how many the mesh has, which share the limits of keys.
        is_new: whether a request has no output yet, so that it may give way.
        evict: refuses requests that give way.
    """

    def __init__(
        self,
        config: GatewayConfig,
        num_gateways: Callable[[], int],
        is_new: Callable[[str], bool],
        evict: Callable[[Evicted], None],
    ) -> None:
        self._config = config
        self._is_new = is_new
        self._evict = evict
        self._turns_away = False
        self._emptied = asyncio.Event()
        self.is_draining = False
        self.num_calls = self.num_over_share = 0
        self.in_flight = InFlight()
        self.key_use = KeyUse(num_gateways, retry_after_s=config.retry_after_s)

    def enter(self, client: Client = NOBODY, key: ApiKey | None = None) -> Place:
        """Called before the body is read; raises `ApiError` if the call, or another one of `key`, cannot be taken.

        `leave` has to be called with what is returned.
        """
        if self._turns_away:
            raise Unavailable("This gateway is draining.", code="draining", retry_after_s=self._config.retry_after_s)
        if key is not None:
            self.key_use.enter(key)
        most, num = self._config.max_inflight, self.in_flight.num_calls
        has_room = num < most or self._make_room(client, 1, 1)
        if not has_room and (self.in_flight.num_of(client) or num >= most + most // RESERVE):
            if key is not None:
                self.key_use.leave(key)
            message = f"{num} calls are in flight, the maximum for this gateway (max_inflight)."
            raise TooManyRequests(message, retry_after_s=self._config.retry_after_s)
        place = Place(client, key)
        self.in_flight.enter(place)
        self.num_calls += 1
        return place

    def leave(self, place: Place) -> None:
        """The call has ended, whatever became of it."""
        if place.key is not None:
            self.key_use.leave(place.key)
        self.in_flight.leave(place)
        self.num_calls -= 1
        if self.num_calls == 0:
            self._emptied.set()

    def admit(self, place: Place, num_requests: int, num_here: int) -> None:
        """Raise `ApiError` unless the `num_requests` of one call fit beside the `num_here` that there are."""
        most = self._config.max_inflight
        num_needed = num_here + num_requests - most
        # What is larger than the whole gateway would refuse all others for nothing.
        has_room = num_needed <= 0 or (num_requests <= most and self._make_room(place.client, num_requests, num_needed))
        if not has_room and (self.in_flight.num_of(place.client) > 1 or num_needed > most // RESERVE):
            message = f"{num_here} requests are in flight; {num_requests} more would exceed the limit of {most}."
            raise TooManyRequests(message, retry_after_s=self._config.retry_after_s)

    def begin_drain(self, *, turn_away: bool) -> None:
        """Stop being ready; with `turn_away`, new calls get a 503."""
        self.is_draining = True
        self._turns_away = turn_away

    async def emptied(self) -> None:
        """Wait until no call is left."""
        while self.num_calls:
            # In a loop: a new call may have come between the end of the last one and this task's turn.
            self._emptied.clear()
            await self._emptied.wait()

    def _make_room(self, client: Client, size: int, num_needed: int) -> bool:
        """Refuse calls without output of clients that have more than `client`; False if it is the one to be refused."""
        refused = self.in_flight.to_refuse(client, size, num_needed, self._may_give_way)
        for place in refused or ():
            most, num = self._config.max_inflight, self.in_flight.num_of(place.client)
            message = (
                f"This gateway has as many requests as it may (max_inflight {most}); this client has most of them,"
                f" {num} calls, and the newest of these gives way to another client's: send fewer at once, or try again"
                " later."
            )
            self.in_flight.leave(place)
            self.num_over_share += 1
            # In one event: what is cancelled at a scheduler is one ask then.
            self._evict(Evicted(place.request_ids, Failure(OVER_SHARE, message)))
        return refused is not None

    def _may_give_way(self, place: Place) -> bool:
        return bool(place.request_ids) and all(map(self._is_new, place.request_ids))
