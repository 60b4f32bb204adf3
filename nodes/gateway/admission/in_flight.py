"""Calls that a gateway has, by client, and whose are refused when it may have no more: the newest without output of
the client that has most, by weight, or the newcomer, if that is its own. Pure.
"""

from collections.abc import Callable
from typing import Final

from nodes.api_keys.entries import ApiKey
from nodes.gateway.clients import NOBODY, Client

_ITSELF: Final = 1
"""A call without a request counts, too: it will have one."""


class Place:
    """One call, from its head to its end. `request_ids` are those of its requests that were opened."""

    __slots__ = ("client", "key", "request_ids", "size")

    def __init__(self, client: Client = NOBODY, key: ApiKey | None = None) -> None:
        self.client = client
        self.key = key
        self.request_ids: list[str] = []
        self.size = _ITSELF


class _Calls:
    """Of one client, oldest first."""

    __slots__ = ("places", "size", "weight")

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self.size = 0
        self.weight = 1


class InFlight:
    """The calls of all clients; who has left is forgotten."""

    def __init__(self) -> None:
        self._calls: dict[str, _Calls] = {}
        self.num_calls = 0

    def __len__(self) -> int:
        """How many clients have calls."""
        return len(self._calls)

    def enter(self, place: Place) -> None:
        calls = self._calls.setdefault(place.client.name, _Calls())
        calls.places[place] = None
        calls.size += place.size
        calls.weight = max(1, place.client.weight)
        self.num_calls += 1

    def opened(self, place: Place, request_ids: list[str]) -> None:
        """A call has requests from now on, or more of them."""
        place.request_ids += request_ids
        self._resize(place)

    def closed(self, place: Place, request_ids: list[str]) -> None:
        """Some of its requests are over, but not the call."""
        if place.request_ids == request_ids:
            # Nearly every call: all of them are over.
            place.request_ids = []
        else:
            over = frozenset(request_ids)
            place.request_ids = [one for one in place.request_ids if one not in over]
        self._resize(place)

    def leave(self, place: Place) -> None:
        """The call is over, or refused; calling this again is harmless."""
        calls = self._calls.get(place.client.name)
        if calls is None or place not in calls.places:
            return
        del calls.places[place]
        calls.size -= place.size
        self.num_calls -= 1
        if not calls.places:
            # Clients come and go: forget those without calls.
            del self._calls[place.client.name]

    def num_of(self, client: Client) -> int:
        calls = self._calls.get(client.name)
        return 0 if calls is None else len(calls.places)

    def to_refuse(
        self, client: Client, size: int, num_needed: int, is_new: Callable[[Place], bool]
    ) -> list[Place] | None:
        """The calls that make room for `num_needed` requests of the `size` more that `client` wants; None: it is the
        one to be refused. `is_new` says whether a call has no output yet.
        """
        own = self._calls.get(client.name)
        load = ((own.size if own is not None else 0) + size) / max(1, client.weight)
        sizes = {name: calls.size for name, calls in self._calls.items() if name != client.name}
        # Looked for lazily: of the heaviest client one call is enough as a rule, and it may have two thousand.
        newest = {name: (one for one in reversed(self._calls[name].places) if is_new(one)) for name in sizes}
        chosen: list[Place] = []
        while num_needed > 0:
            name = max(sizes, key=lambda one: sizes[one] / self._calls[one].weight, default=None)
            # Who would have more than anybody else is the one to be refused, or the limit would move to its victims.
            if name is None or sizes[name] / self._calls[name].weight <= load:
                return None
            place = next(newest[name], None)
            if place is None:
                # All that it has is being answered: the next one, then.
                del sizes[name]
                continue
            chosen.append(place)
            sizes[name] -= place.size
            num_needed -= place.size
        return chosen

    def _resize(self, place: Place) -> None:
        before, place.size = place.size, len(place.request_ids) or _ITSELF
        if place.size == before:
            return
        calls = self._calls.get(place.client.name)
        if calls is not None and place in calls.places:
            calls.size += place.size - before
