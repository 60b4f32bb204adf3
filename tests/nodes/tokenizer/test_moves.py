"""Where requests of a group without worker go on sooner, if anywhere; and which groups are without worker."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address, Endpoint
from mesh.membership.view import Member
from nodes.protocol import ChooseMoves, ChooseRoute, Load, Route
from nodes.request import VECTORS
from nodes.tokenizer.config import RoutingLimits
from nodes.tokenizer.routing.core import (
    MOVE_S,
    CacheChanged,
    LinkLost,
    LoadChanged,
    MembersChanged,
    PeerDied,
    RoutingCore,
)
from nodes.tokenizer.routing.dead_workers import MAX_REMEMBERED, DeadWorkers
from tests.nodes.tokenizer.test_routing import DETOKENIZERS, member, stored

PROMPT = list(range(100, 300))
RATE = 1000.0


def worker(actor_id: str, epoch: int = 1, state: str = "ready", **attributes: Any) -> Member:
    known = {"group": actor_id.removeprefix("w-")} | attributes
    endpoint = Endpoint("c", "d")
    return Member(actor_id=actor_id, role="worker", epoch=epoch, endpoint=endpoint, state=state, attributes=known)


def group(name: str, **attributes: Any) -> Member:
    return member(name, **{"group": name, "numerics": "bits", "weights": "w"} | attributes)


def load(**fields: Any) -> Load:
    known = {"num_running": 0, "num_waiting": 0, "num_free_pages": 1000, "num_pages": 1000}
    return Load(**(known | {"prefill_tokens_per_s": RATE} | fields))


def router(*schedulers: Member, loads: bool = True) -> RoutingCore:
    core = RoutingCore(RoutingLimits())
    core.handle(MembersChanged([*schedulers, *(worker(f"w-{one.actor_id}") for one in schedulers), *DETOKENIZERS]))
    for one in schedulers if loads else ():
        core.handle(LoadChanged(one.actor_id, load()))
    return core


def asked(request_id: str = "r", token_ids: list[int] = PROMPT, **fields: Any) -> ChooseRoute:
    return ChooseRoute(request_id=request_id, token_ids=token_ids, **fields)


def moves(
    core: RoutingCore, *requests: ChooseRoute, returns_in_s: float = 1.0, holder: str = "a", now: float = 0.0
) -> dict[str, Route]:
    ask = ChooseMoves(holder=holder, returns_in_s=returns_in_s, requests=list(requests) or [asked()])
    return core.choose_moves(ask, now)


NEEDED_S = MOVE_S + len(PROMPT) / RATE


def test_a_request_moves_if_computing_it_takes_less_than_the_worker_is_away() -> None:
    assert moves(router(group("a"), group("b")), returns_in_s=NEEDED_S + 0.01)["r"].decode == "b"
    assert moves(router(group("a"), group("b")), returns_in_s=NEEDED_S - 0.01) == {}


def test_what_is_cached_there_need_not_be_computed() -> None:
    core = router(group("a"), group("b"))
    core.handle(CacheChanged("b", stored(PROMPT[:160])))
    assert moves(core, returns_in_s=MOVE_S + 41 / RATE)["r"].decode == "b"
    assert moves(core, returns_in_s=MOVE_S + 39 / RATE) == {}


def test_each_request_that_moves_counts_for_the_next() -> None:
    requests = [asked(f"r{number}", [number, *PROMPT]) for number in range(8)]
    found = moves(router(group("a"), group("b")), *requests, returns_in_s=MOVE_S + 3.5 * len(PROMPT) / RATE)
    assert set(found) == {"r0", "r1", "r2"}


def test_what_waits_there_counts_too() -> None:
    core = router(group("a"), group("b"))
    core.handle(LoadChanged("b", load(num_waiting_tokens=5000)))
    assert moves(core) == {}


def test_nobody_else_makes_room_for_a_move() -> None:
    core = router(group("a"), group("b"))
    core.handle(LoadChanged("b", load(num_free_pages=len(PROMPT) // 4)))
    assert moves(core) == {}
    core.handle(LoadChanged("b", load(num_free_pages=len(PROMPT) // 4 + 1)))
    assert set(moves(core)) == {"r"}
    assert moves(core, asked("next")) == {}, "the first one has taken them"


@pytest.mark.parametrize("value", ["other", ""])
@pytest.mark.parametrize("what", ["numerics", "weights"])
def test_other_bits_are_no_place_to_move_to(what: str, value: str) -> None:
    other = {what: value}
    assert moves(router(group("a"), group("b", **other)), returns_in_s=math.inf) == {}
    assert moves(router(group("a", **{what: ""}), group("b", **{what: ""})), returns_in_s=math.inf) == {}
    # Nor is its prompt prefilled there for a group that is one.
    core = router(group("a"), group("b", phase="decode"), group("p", phase="prefill", **other))
    assert moves(core, returns_in_s=math.inf)["r"].prefill == ""


def test_a_request_goes_on_with_the_bits_of_its_first_output() -> None:
    core = router(group("a"), group("b"), group("c", numerics="first"), group("d", weights="first"))
    assert moves(core, asked(numerics="first", weights="w"))["r"].decode == "c"
    assert moves(core, asked(numerics="bits", weights="first"))["r"].decode == "d"
    assert moves(core, asked(numerics="bits")) == {}, "of unknown weights"


@pytest.mark.parametrize(
    "away",
    [
        {"worker_ready": False},
        {"phase": "prefill"},
        {"page_size": 0},
        {"asks": []},
    ],
)
def test_a_group_that_cannot_serve_it_is_no_place(away: dict[str, Any]) -> None:
    core = router(group("a", asks=["x"]), group("b", **{"asks": ["x"]} | away))
    assert moves(core, asked(asks=["x"]), returns_in_s=math.inf) == {}


def test_what_no_group_can_do_moves_nowhere() -> None:
    assert moves(router(group("a"), group("b")), asked(asks=["x"]), returns_in_s=math.inf) == {}


def test_a_group_that_is_dead_itself_or_out_of_reach_is_no_place() -> None:
    core = router(group("a"), group("b"), group("c"))
    core.handle(PeerDied(Address("w-a", 1)))
    core.handle(PeerDied(Address("w-b", 1)))
    assert moves(core)["r"].decode == "c"
    core.handle(LinkLost(Address("c", 1), 0.0))
    assert moves(core) == {}
    assert moves(core, asked(excluded=["c"]), now=60.0) == {}
    assert moves(router(), holder="nobody") == {}


def test_a_prompt_is_prefilled_where_it_is_cached_at_the_rate_of_that_group() -> None:
    core = router(group("a", phase="decode"), group("b", phase="decode"), group("p", phase="prefill"))
    for decode in ("a", "b"):
        core.handle(LoadChanged(decode, load(prefill_tokens_per_s=0.0)))
    core.handle(CacheChanged("p", stored(PROMPT[:160])))
    route = moves(core, returns_in_s=MOVE_S + 41 / RATE)["r"]
    assert (route.decode, route.prefill, bool(route.detokenizer)) == ("b", "p", True)
    core.handle(PeerDied(Address("w-p", 1)))
    assert moves(core, asked("s"), returns_in_s=NEEDED_S - 0.01) == {}, "b has nothing of it"


def test_no_group_of_other_bits_prefills_what_moves() -> None:
    core = router(group("a", phase="decode"), group("b", phase="decode"), group("p", phase="prefill", numerics="other"))
    assert moves(core) == {"r": Route(decode="b", detokenizer=moves(core)["r"].detokenizer)}


def test_equal_machines_are_equally_fast() -> None:
    core = router(group("a"), group("b"))
    core.handle(LoadChanged("b", load(prefill_tokens_per_s=0.0)))
    assert set(moves(core)) == {"r"}, "by the rate of the holder"
    core.handle(LoadChanged("a", load(prefill_tokens_per_s=math.nan)))
    assert moves(core, asked("s"), returns_in_s=math.inf) == {}, "nobody's is known"
    assert moves(router(group("a"), group("b"), loads=False), returns_in_s=math.inf) == {}


def test_a_vector_moves_to_where_vectors_are_made() -> None:
    asks = {"asks": [VECTORS]}
    core = router(group("a", phase="prefill", **asks), group("d", phase="decode", **asks))
    assert moves(core, asked(asks=[VECTORS])) == {}
    core = router(group("a", phase="prefill", **asks), group("p", phase="prefill", **asks))
    assert moves(core, asked(asks=[VECTORS])) == {"r": Route(decode="p")}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["mixed", "decode", "prefill"]), st.sampled_from(["bits", "other", ""]), st.booleans(),
            st.booleans(), st.sampled_from([0.0, 10.0, 1e6, math.nan, math.inf, -1.0]), st.integers(0, 300),
        ),
        min_size=1, max_size=5,
    ),
    st.floats(),
    st.integers(1, 6),
)  # fmt: skip
def test_whoever_moves_gets_a_living_group_of_the_same_bits_and_no_time_that_is_none_moves_anybody(
    groups: list[tuple[str, str, bool, bool, float, int]], returns_in_s: float, num: int
) -> None:
    members = [group("a", phase="decode")]
    for number, (phase, numerics, has_worker, _, _, _) in enumerate(groups):
        members.append(group(f"g{number}", phase=phase, numerics=numerics, worker_ready=has_worker))
    core = router(*members)
    dead = {"a"}
    core.handle(PeerDied(Address("w-a", 1)))
    for number, (_, _, _, is_dead, rate, num_free) in enumerate(groups):
        if is_dead:
            dead.add(f"g{number}")
            core.handle(PeerDied(Address(f"w-g{number}", 1)))
        core.handle(LoadChanged(f"g{number}", load(prefill_tokens_per_s=rate, num_free_pages=num_free)))
    requests = [asked(f"r{number}", [number, *PROMPT]) for number in range(num)]
    found = moves(core, *requests, returns_in_s=returns_in_s)
    by_id = {one.actor_id: one for one in members}
    for route in found.values():
        place = by_id[route.decode]
        assert route.decode not in dead
        assert place.attributes["numerics"] == "bits"
        assert place.attributes["phase"] != "prefill"
        assert place.attributes.get("worker_ready", True)
        if route.prefill:
            assert by_id[route.prefill].attributes["phase"] == "prefill"
            assert route.prefill not in dead
    if not returns_in_s > MOVE_S:
        assert found == {}


# which groups are without worker


def test_a_group_is_away_from_the_death_of_its_worker_until_a_later_one_is_ready() -> None:
    core = router(group("a"), group("b"))
    core.handle(LoadChanged("b", load(num_waiting=50)))
    assert core.choose("r", PROMPT, "", (), 0.0).decode == "a"
    # The view without the dead one comes before the word of its death, and what it announced is gone by then.
    core.handle(MembersChanged([group("a"), group("b"), worker("w-b"), *DETOKENIZERS]))
    core.handle(PeerDied(Address("w-a", 1)))
    assert core.choose("r", PROMPT, "", (), 1.0).decode == "b"
    members = [group("a"), group("b"), worker("w-b"), *DETOKENIZERS]
    for back in (worker("w-a"), worker("w-a", 2, "starting")):
        core.handle(MembersChanged([*members, back]))
        assert core.choose("r", PROMPT, "", (), 2.0).decode == "b", "a view that is older, and a start"
    core.handle(MembersChanged([*members, worker("w-a", 2)]))
    assert core.choose("r", PROMPT, "", (), 9.0).decode == "a"


def test_a_death_that_is_heard_of_after_the_return_says_nothing() -> None:
    core = router(group("a"), group("b"))
    core.handle(LoadChanged("b", load(num_waiting=50)))
    core.handle(MembersChanged([group("a"), group("b"), worker("w-a", 2), worker("w-b"), *DETOKENIZERS]))
    core.handle(PeerDied(Address("w-a", 1)))
    assert core.choose("r", PROMPT, "", (), 0.0).decode == "a"


def test_the_death_of_somebody_else_says_nothing() -> None:
    core = router(group("a"))
    core.handle(PeerDied(Address("gw", 1)))
    core.handle(PeerDied(Address("never seen", 1)))
    assert core.choose("r", PROMPT, "", (), 0.0).decode == "a"


def test_a_worker_with_strange_attributes_is_of_no_group() -> None:
    dead = DeadWorkers()
    for strange in (None, 7, "", ["g"]):
        dead.see(msgspec.structs.replace(worker("w-x"), attributes={"group": strange}))
        dead.died(Address("w-x", 1))
    assert not dead.is_away("")


def test_few_workers_are_remembered() -> None:
    dead = DeadWorkers()
    for number in range(MAX_REMEMBERED + 1):
        dead.see(worker(f"w-{number}"))
        dead.died(Address(f"w-{number}", 1))
    assert not dead.is_away("0")
    assert dead.is_away("1")
