"""Where a request goes: the pure core of routing.

Tracks which actors there are (registry), what their prefix caches hold (cache events) and how busy they are (load).
Every choice minimises the prompt tokens that have to be computed before the request's first token: its own that no
cache holds, those that wait before it, and the share that running requests take of each step. There is soft state only:
with an empty index, load decides; stale load is corrected by counting one's own recent choices. Ties are broken by a
hash of the request id: tokenizers that know the same choose the same, and equal requests are spread. Called by
`nodes/tokenizer/actor.py`.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstore.hashing import TOKEN_BYTES, pack_tokens, page_hash, root_hash
from kvstore.protocol import CacheEvents
from mesh.address import Address
from mesh.membership.view import READY, RELEASED, Member
from nodes.numerics import UNKNOWN_BITS, Bits
from nodes.protocol import ChooseMoves, ChooseRoute, Load, Route
from nodes.request import VECTORS
from nodes.roles import DETOKENIZER, SCHEDULER, WORKER, SchedulerAttributes
from nodes.tokenizer.config import RoutingLimits
from nodes.tokenizer.errors import MemoryReleased, NoCapacity, PrepareError, UnsupportedAsk
from nodes.tokenizer.routing.cache_index import CacheIndex
from nodes.tokenizer.routing.dead_workers import DeadWorkers

PREFILL = "prefill"
DECODE = "decode"
MIXED = "mixed"
REQUEST_TOKENS = 32
"""What a running or waiting request counts as, in prompt tokens, for the share of each step that it takes."""
SHORTAGE_WEIGHT = 2.0
"""A page that is not free counts as so many times its tokens, since another request will be preempted for it."""
LOST_S = 5.0
"""How long a scheduler is the last choice after its link was lost, if nothing is heard of it: until its lease ends."""

MOVE_S = 0.035
"""What a move takes beside computing a prompt: 36 to 86 ms in 26 moves of `benchmarks/around.py`, nine at a time on two
busy cores, from the submission to the first token; most of it for the grant and for pages that arrive."""

LEFT_S = 60.0
"""How long a group that has left is waited for, if no other can do what a request asks: a process that is started again
is no member until it has loaded its model."""
MAX_LEFT = 256
"""Groups that have left and are remembered."""


class MembersChanged(NamedTuple):
    """Everyone in the mesh, in whatever state."""

    members: Iterable[Member]


class CacheChanged(NamedTuple):
    """A publication of a scheduler's cache events."""

    scheduler: str
    events: CacheEvents


class CacheUnknown(NamedTuple):
    """Cache events of a scheduler were missed, or come from a new incarnation: what was known no longer holds."""

    scheduler: str


class LoadChanged(NamedTuple):
    """A publication of a scheduler's load."""

    scheduler: str
    load: Load


class Follow(NamedTuple):
    """Subscribe to a scheduler's topics."""

    scheduler: str


class Unfollow(NamedTuple):
    """Unsubscribe from the topics of a scheduler that is gone."""

    scheduler: str


class LinkLost(NamedTuple):
    """An incarnation's link is lost: it is dead, cut off, or will be linked again. `now`: as in `choose`."""

    peer: Address
    now: float


class PeerDied(NamedTuple):
    """A supervisor has reaped this incarnation: if it was a group's worker, that group is away until the next one."""

    peer: Address


Event = MembersChanged | CacheChanged | CacheUnknown | LoadChanged | LinkLost | PeerDied
Command = Follow | Unfollow


class _Scheduler:
    """What is known of one scheduler."""

    __slots__ = (
        "actor_id", "attributes", "epoch", "index", "load", "lost_until", "num_recent_tokens",
        "ready", "recent", "released",
    )  # fmt: skip

    def __init__(self, actor_id: str, max_pages: int) -> None:
        self.actor_id = actor_id
        self.attributes = SchedulerAttributes()
        self.ready = self.released = False
        self.epoch = 0
        self.lost_until = 0.0
        self.index = CacheIndex(max_pages)
        self.load: Load | None = None
        self.recent: deque[tuple[float, int]] = deque()
        """This tokenizer's choices that the scheduler's load cannot show yet: (time, tokens to prefill)."""
        self.num_recent_tokens = 0

    def remember(self, now: float, num_tokens: int) -> None:
        self.recent.append((now, num_tokens))
        self.num_recent_tokens += num_tokens

    @property
    def bits(self) -> Bits:
        return Bits(self.attributes.weights, self.attributes.numerics)

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts that it computes in a second; 0.0 if that is not known."""
        rate = 0.0 if self.load is None else self.load.prefill_tokens_per_s
        # A number off the wire: of one that is none, nothing is known.
        return rate if math.isfinite(rate) and rate > 0 else 0.0

    def holds(self, num_tokens: int) -> bool:
        """Whether a prompt fits its pool at all, as far as is known: if not, the scheduler would refuse the order."""
        return self.load is None or num_tokens <= self.load.num_pages * self.attributes.page_size

    def forget_until(self, time: float) -> None:
        """Drop the choices up to `time`: the scheduler's load shows them."""
        while self.recent and self.recent[0][0] <= time:
            self.num_recent_tokens -= self.recent.popleft()[1]


class RoutingCore:
    """All schedulers and detokenizers as one tokenizer knows them."""

    def __init__(self, limits: RoutingLimits) -> None:
        self._limits = limits
        self.schedulers: dict[str, _Scheduler] = {}
        self._detokenizers: list[str] = []
        # What each group's last worker could do, also of groups that are away; when those that left were first missed.
        self._could: dict[str, Collection[str]] = {}
        self._missed_at: dict[str, float] = {}
        self._dead_workers = DeadWorkers()

    @property
    def num_indexed_pages(self) -> int:
        return sum(len(scheduler.index) for scheduler in self.schedulers.values())

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, MembersChanged):
            return self._take_members(event.members)
        if isinstance(event, LinkLost):
            lost = self.schedulers.get(event.peer.actor_id)
            if lost is not None and lost.epoch == event.peer.epoch:
                lost.lost_until = event.now + LOST_S
            return []
        if isinstance(event, PeerDied):
            self._dead_workers.died(event.peer)
            return []
        scheduler = self.schedulers.get(event.scheduler)
        if scheduler is None:
            return []
        scheduler.lost_until = 0.0
        if isinstance(event, CacheChanged):
            scheduler.index.apply(event.events.events)
        elif isinstance(event, CacheUnknown):
            scheduler.index.clear()
        else:
            scheduler.load = event.load
        return []

    def choose(
        self,
        request_id: str,
        token_ids: Sequence[int],
        extra_key: str,
        excluded: Collection[str],
        now: float,
        bits: Bits = UNKNOWN_BITS,
        asks: Collection[str] = (),
    ) -> Route:
        """The route of one request. Excluded actors are chosen only if no others are left.

        A request that has output, computed with `bits`, goes on at a scheduler of the same weights alone, and there of
        the same numerics, whatever that costs, if one can begin at once. Only groups whose workers can do all of `asks`
        are chosen, for the prefill too, and of those that have weights in common. A request for a vector goes straight
        to a group that prefills, and needs no detokenizer. `now` is any monotonic clock, seconds.

        Raises NoCapacity, UnsupportedAsk.
        """
        is_vector = VECTORS in asks
        # A vector goes to the gateway as it is.
        detokenizer = "" if is_vector else self._choose_detokenizer(request_id, excluded)
        ready = self._able(asks, now)
        if bits.weights:
            ready = [one for one in ready if one.attributes.weights == bits.weights]
            if not ready:
                # Other numerics round otherwise, other weights are another model: half an answer of each is no answer.
                raise NoCapacity("no group that is ready has the weights that computed this request's output so far")
        overlaps = _overlaps(ready, token_ids, extra_key)

        def rank(scheduler: _Scheduler) -> tuple[object, ...]:
            return (
                scheduler.actor_id in excluded,
                *self._absence(scheduler, now),
                # A prefill group decodes only while no other group can. A vector is a prefill: others do it as well,
                # but with their decoding in its way.
                scheduler.attributes.phase not in (PREFILL, MIXED)
                if is_vector
                else scheduler.attributes.phase == PREFILL,
                # Ranks below a ready worker: going on with other bits is better than a stalled stream.
                bool(bits.numerics) and scheduler.attributes.numerics != bits.numerics,
                self._cost(scheduler, len(token_ids), overlaps[scheduler.actor_id], now),
                _draw(request_id, scheduler.actor_id),
            )

        decode = min(ready, key=rank)
        prefill = None
        if decode.attributes.phase not in (PREFILL, MIXED) and not is_vector:
            alike = [one for one in ready if one.attributes.weights == decode.attributes.weights]
            prefilling = self._prefilling(alike, len(token_ids), excluded, now)
            # Mostly there is one, which needs no rank.
            prefill = prefilling[0] if len(prefilling) == 1 else min(prefilling, key=rank, default=None)
        for scheduler in filter(None, (decode, prefill)):
            scheduler.remember(now, len(token_ids) - overlaps[scheduler.actor_id])
        return Route(
            decode=decode.actor_id,
            prefill="" if prefill is None else prefill.actor_id,
            detokenizer=detokenizer,
        )

    def choose_moves(self, ask: ChooseMoves, now: float) -> dict[str, Route]:
        """New routes, by request id, for those requests of a holder without worker that go on sooner elsewhere.

        Each that moves counts for the next one, so that of many only as many move as are computed in time. `now` as in
        `choose`.
        """
        holder, moves = self.schedulers.get(ask.holder), dict[str, Route]()
        for request in ask.requests if holder is not None else ():
            assert holder is not None, "without one nothing is looked at"
            if (route := self._move(holder, request, ask.returns_in_s, now)) is not None:
                moves[request.request_id] = route
        return moves

    def _move(self, holder: _Scheduler, request: ChooseRoute, returns_in_s: float, now: float) -> Route | None:
        is_vector, num_tokens = VECTORS in request.asks, len(request.token_ids)
        excluded = (*request.excluded, holder.actor_id)
        bits = Bits(request.weights, request.numerics) if request.numerics else holder.bits
        try:
            able = self._able(request.asks, now)
            detokenizer = "" if is_vector else self._choose_detokenizer(request.request_id, request.excluded)
        except PrepareError:
            return None
        # A prefill group decodes for nobody whose own group is back in a moment, and decode groups make no vectors.
        wrong_phase = DECODE if is_vector else PREFILL
        groups = [
            one
            for one in able
            # Before anything else: other bits may be other text, and to wait costs only time.
            if one.bits == bits
            and bits.are_known
            and one.attributes.phase != wrong_phase
            and one.actor_id not in excluded
            and one.holds(num_tokens)
            and not any(self._absence(one, now))
        ]
        if not groups:
            return None
        prefilling = [
            one for one in ([] if is_vector else self._prefilling(able, num_tokens, excluded, now)) if one.bits == bits
        ]
        both = {one.actor_id: one for one in (*groups, *prefilling)}
        overlaps = _overlaps(both.values(), request.token_ids, request.extra_key)
        places = [self._place(one, prefilling, holder, num_tokens, overlaps, now) for one in groups]
        seconds, decode, prefill = min(places, key=lambda one: (one[0], _draw(request.request_id, one[1].actor_id)))
        # Nothing is less than a time that is no number.
        if not seconds < returns_in_s:
            return None
        for scheduler in filter(None, (decode, prefill)):
            scheduler.remember(now, num_tokens - overlaps[scheduler.actor_id])
        return Route(decode=decode.actor_id, prefill=prefill.actor_id if prefill else "", detokenizer=detokenizer)

    def _place(
        self,
        decode: _Scheduler,
        prefilling: list[_Scheduler],
        holder: _Scheduler,
        num_tokens: int,
        overlaps: Mapping[str, int],
        now: float,
    ) -> tuple[float, _Scheduler, _Scheduler | None]:
        """Seconds until a moved request of `num_tokens` goes on in group `decode`, and who prefills it for that one."""
        prefill = None
        if decode.attributes.phase not in (PREFILL, MIXED):
            costs = {one.actor_id: self._cost(one, num_tokens, overlaps[one.actor_id], now) for one in prefilling}
            prefill = min(prefilling, key=lambda one: costs[one.actor_id], default=None)
        where, num_cached = prefill or decode, overlaps[decode.actor_id]
        for one in (where, decode):
            one.forget_until(now - self._limits.recent_s)
        load, page_size = decode.load, decode.attributes.page_size
        num_new_pages = (num_tokens - num_cached + decode.num_recent_tokens) // page_size + 1
        # Without a rate of its own: equal numerics mean equal machines, so the holder's says as much.
        rate = next((one.prefill_rate for one in (where, decode, holder) if one.prefill_rate), 0.0)
        if not rate or (load is not None and num_new_pages > load.num_free_pages):
            # Others would have to make room for it, or it for them.
            return math.inf, decode, prefill
        waiting = where.num_recent_tokens + (0 if where.load is None else where.load.num_waiting_tokens)
        work = num_tokens - max(num_cached, overlaps[where.actor_id]) + waiting
        return MOVE_S + work / rate, decode, prefill

    def _absence(self, scheduler: _Scheduler, now: float) -> tuple[bool, bool]:
        """Whether it cannot be reached, and whether it has no worker."""
        # A host that is cut off stays a member until its lease ends, and dialling it is in vain.
        attributes, is_lost = scheduler.attributes, now < scheduler.lost_until
        return is_lost, not attributes.worker_ready or self._dead_workers.is_away(attributes.group)

    def _prefilling(
        self, ready: Iterable[_Scheduler], num_tokens: int, excluded: Collection[str], now: float
    ) -> list[_Scheduler]:
        """Where a prompt may be prefilled for another group that decodes it."""
        # One that is excluded, lost or without a worker is worse than the decode scheduler, which can prefill.
        return [
            one
            for one in ready
            if one.attributes.phase == PREFILL
            and one.holds(num_tokens)
            and one.actor_id not in excluded
            and not any(self._absence(one, now))
        ]

    def _able(self, asks: Collection[str], now: float) -> list[_Scheduler]:
        """The ready schedulers whose workers can do all of `asks`. Raises NoCapacity, UnsupportedAsk."""
        ready = [scheduler for scheduler in self.schedulers.values() if scheduler.ready]
        if not ready:
            if any(scheduler.released for scheduler in self.schedulers.values()):
                raise MemoryReleased("the memory of all worker groups is released; `meshctl resume` brings it back")
            raise NoCapacity("no scheduler is ready; try again in a moment")
        able = [scheduler for scheduler in ready if set(asks).issubset(scheduler.attributes.asks)]
        if not able:
            missing = next((ask for ask in asks if not any(ask in one.attributes.asks for one in ready)), "")
            name = missing.partition("/")[0]
            what = f"do '{name}'" if name else "do all that it asks of its draws together"
            if missing == VECTORS:
                # Which is no field of a request.
                what, name = "make vectors", ""
            # Groups of different releases: nobody is to be told for ever what holds while one of them is away.
            if self._is_away(asks, now) or all(one.attributes.phase == PREFILL for one in ready):
                raise NoCapacity(f"no worker group that is ready can {what} for this request; try again in a moment")
            raise UnsupportedAsk(f"no worker group of this mesh can {what} for this request", name or None)
        return able

    def _is_away(self, asks: Collection[str], now: float) -> bool:
        """Whether a group that could do all of `asks` is expected back."""
        able = [actor_id for actor_id, could in self._could.items() if set(asks).issubset(could)]
        return any(one in self.schedulers or now < self._missed_at.setdefault(one, now) + LEFT_S for one in able)

    def _cost(self, scheduler: _Scheduler, num_tokens: int, overlap: int, now: float) -> float:
        """Prompt tokens to compute before the first token of a prompt of `num_tokens`, `overlap` of them cached."""
        load = scheduler.load
        scheduler.forget_until(now - self._limits.recent_s)
        num_requests = len(scheduler.recent)
        # Includes own choices that its load does not show yet: else a burst between two reports goes to one scheduler.
        cost = float(num_tokens - overlap + scheduler.num_recent_tokens)
        if load is not None:
            num_requests += load.num_running + load.num_waiting
            page_size = scheduler.attributes.page_size
            shortage = (num_tokens - overlap) // page_size + 1 - load.num_free_pages
            cost += load.num_waiting_tokens + SHORTAGE_WEIGHT * page_size * max(shortage, 0)
        return cost + REQUEST_TOKENS * num_requests

    def _choose_detokenizer(self, request_id: str, excluded: Collection[str]) -> str:
        """Highest random weight: a request stays with its detokenizer while others come and go."""
        if not self._detokenizers:
            raise NoCapacity("no detokenizer is ready; try again in a moment")
        usable = [actor_id for actor_id in self._detokenizers if actor_id not in excluded] or self._detokenizers
        return max(usable, key=lambda actor_id: _draw(request_id, actor_id))

    def _take_members(self, members: Iterable[Member]) -> list[Command]:
        schedulers: dict[str, Member] = {}
        detokenizers: list[str] = []
        for member in members:
            if member.role == SCHEDULER:
                schedulers[member.actor_id] = member
            elif member.role == DETOKENIZER and member.state == READY:
                detokenizers.append(member.actor_id)
            elif member.role == WORKER:
                self._dead_workers.see(member)
        self._detokenizers = sorted(detokenizers)
        commands: list[Command] = []
        for actor_id in sorted(self.schedulers.keys() - schedulers.keys()):
            del self.schedulers[actor_id]
            commands.append(Unfollow(actor_id))
        for actor_id, member in sorted(schedulers.items()):
            if actor_id not in self.schedulers:
                self.schedulers[actor_id] = _Scheduler(actor_id, self._limits.max_pages)
                commands.append(Follow(actor_id))
            _update(self.schedulers[actor_id], member)
            self._missed_at.pop(actor_id, None)
            if self.schedulers[actor_id].ready:
                self._could[actor_id] = self.schedulers[actor_id].attributes.asks
        for actor_id in [one for one in self._could if one not in schedulers][:-MAX_LEFT]:
            del self._could[actor_id]
            self._missed_at.pop(actor_id, None)
        return commands


def _update(scheduler: _Scheduler, member: Member) -> None:
    try:
        scheduler.attributes = msgspec.convert(member.attributes, SchedulerAttributes)
    except msgspec.ValidationError:
        # A foreign scheduler whose attributes are different: nothing is known of how to use it.
        scheduler.ready = scheduler.released = False
        return
    if scheduler.epoch != member.epoch:
        scheduler.epoch, scheduler.lost_until = member.epoch, 0.0
    scheduler.released = member.state == RELEASED
    scheduler.ready = member.state == READY and scheduler.attributes.page_size > 0


def _overlaps(schedulers: Iterable[_Scheduler], token_ids: Sequence[int], extra_key: str) -> dict[str, int]:
    """Leading tokens of the prompt that each scheduler's cache holds; never all of them, one has to be computed."""
    overlaps: dict[str, int] = {}
    matching: dict[int, list[_Scheduler]] = {}
    for scheduler in schedulers:
        overlaps[scheduler.actor_id] = 0
        if len(scheduler.index):
            matching.setdefault(scheduler.attributes.page_size, []).append(scheduler)
    if matching:
        packed = pack_tokens(token_ids[:-1])
        for page_size, candidates in matching.items():
            _match(candidates, packed, page_size, root_hash(extra_key), overlaps.__setitem__)
    return overlaps


def _match(
    candidates: list[_Scheduler], packed: bytes, page_size: int, root: bytes, found: Callable[[str, int], None]
) -> None:
    stride, parent = page_size * TOKEN_BYTES, root
    for end in range(stride, len(packed) + 1, stride):
        parent = page_hash(parent, packed[end - stride : end])
        # Each page is hashed once, whatever the number of schedulers; one that lacks a page has none after it.
        candidates = [scheduler for scheduler in candidates if parent in scheduler.index]
        if not candidates:
            return
        for scheduler in candidates:
            found(scheduler.actor_id, end // TOKEN_BYTES)


def _draw(request_id: str, actor_id: str) -> bytes:
    """8 bytes, uniform over requests and actors (rendezvous hashing, Thaler and Ravishankar 1998)."""
    return hashlib.blake2b(f"{request_id}\0{actor_id}".encode(), digest_size=8).digest()
