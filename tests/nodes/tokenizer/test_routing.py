"""Routing: by events and by hypothesis."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import chain_hashes, pack_tokens, root_hash
from kvstore.protocol import CacheCleared, CacheEvents, PageRemoved, PagesStored
from mesh.address import Address, Endpoint
from mesh.membership.view import Member
from nodes.numerics import Bits
from nodes.protocol import Load
from nodes.request import VECTORS
from nodes.tokenizer.config import RoutingLimits
from nodes.tokenizer.errors import MemoryReleased, NoCapacity, UnsupportedAsk
from nodes.tokenizer.routing.core import (
    MAX_LEFT,
    CacheChanged,
    CacheUnknown,
    Follow,
    LinkLost,
    LoadChanged,
    MembersChanged,
    RoutingCore,
    Unfollow,
    _overlaps,
)

PAGE = 4
PROMPT = list(range(100, 121))


def member(actor_id, role="scheduler", state="ready", **attributes):
    attributes = {"group": f"g-{actor_id}", "phase": "mixed", "page_size": PAGE} | attributes
    return Member(
        actor_id=actor_id, role=role, epoch=1, endpoint=Endpoint("c", "d"), state=state, attributes=attributes
    )


DETOKENIZERS = [member("detok-0", "detokenizer"), member("detok-1", "detokenizer")]


def router(*schedulers, **weights):
    core = RoutingCore(RoutingLimits(**weights))
    core.handle(MembersChanged([*schedulers, *DETOKENIZERS, member("gw", "gateway")]))
    return core


def stored(token_ids, extra_key=""):
    hashes = chain_hashes(root_hash(extra_key), token_ids, PAGE)
    if not hashes:
        return CacheEvents(events=[])
    tokens = pack_tokens(token_ids[: len(hashes) * PAGE])
    run = PagesStored(group="g", page_hashes=hashes, parent_hash=root_hash(extra_key), tokens=tokens)
    return CacheEvents(events=[run])


def load(**fields):
    defaults = {"num_running": 0, "num_waiting": 0, "num_free_pages": 100, "num_pages": 100}
    return Load(**(defaults | fields))


def choose(core, request_id="r", token_ids=PROMPT, extra_key="", excluded=(), now=0.0, numerics="", weights=""):
    return core.choose(request_id, token_ids, extra_key, excluded, now, Bits(weights, numerics))


def overlap(core, token_ids=PROMPT, extra_key=""):
    """Most tokens of the prompt that a scheduler has cached, as choices count them."""
    return max(_overlaps(core.schedulers.values(), token_ids, extra_key).values())


def test_prefix_overlap_decides():
    core = router(member("a"), member("b"))
    core.handle(CacheChanged("b", stored(PROMPT[:12])))
    for i in range(5):
        route = choose(core, f"r{i}", now=float(i))
        assert (route.decode, route.prefill, overlap(core)) == ("b", "", 12)


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=5 * PAGE)


@given(st.lists(st.tuples(IDS, st.sampled_from(["", "tenant", "other"])), max_size=4), IDS)
def test_routing_finds_what_the_cache_would(served, asked):
    """The same root, pages and hashes on both sides: else requests would go past what is cached for them."""
    cache, core = PrefixCache(100, PAGE, group="g", epoch=1), router(member("a"))
    for token_ids, extra_key in served:
        sequence = cache.start(token_ids, extra_key)
        assert sequence.reserve(len(token_ids))
        sequence.advance(token_ids[sequence.num_tokens :])
        sequence.release()
    while (events := cache.events.drain_message()) is not None:
        core.handle(CacheChanged("a", events))
    for extra_key in ("", "tenant", "other", "nobody"):
        assert overlap(core, asked, extra_key) == cache.match(asked, extra_key).num_tokens


def test_load_decides_where_overlap_does_not():
    core = router(member("a"), member("b"))
    core.handle(LoadChanged("a", load(num_running=5)))
    assert choose(core).decode == "b"
    core.handle(LoadChanged("b", load(num_waiting=6)))
    assert choose(core, now=9).decode == "a"
    core.handle(LoadChanged("a", load(num_waiting_tokens=1000)))
    assert choose(core, now=18).decode == "b"
    core.handle(LoadChanged("b", load(num_free_pages=0)))
    core.handle(LoadChanged("a", load()))
    assert choose(core, now=27).decode == "a"


def test_a_long_queue_outweighs_a_short_overlap():
    core = router(member("a"), member("b"))
    core.handle(CacheChanged("b", stored(PROMPT[:4])))
    core.handle(LoadChanged("b", load(num_waiting=50, num_waiting_tokens=5000)))
    assert choose(core).decode == "a"


def test_own_choices_count_until_load_shows_them():
    core = router(member("a"), member("b"), recent_s=1.0)
    first, second = choose(core, "same", now=0.0), choose(core, "same", now=0.1)
    assert first.decode != second.decode
    assert choose(core, "same", now=5.0).decode == first.decode


def test_whole_prompt_is_never_counted_as_cached():
    core = router(member("a"))
    core.handle(CacheChanged("a", stored(PROMPT[:20])))
    assert overlap(core, token_ids=PROMPT[:20]) == 16
    assert overlap(core, token_ids=PROMPT[:21]) == 20


def test_extra_key_separates_prefixes():
    core = router(member("a"))
    core.handle(CacheChanged("a", stored(PROMPT, "tenant")))
    assert overlap(core) == 0
    assert overlap(core, extra_key="tenant") == 20


def test_removed_and_cleared_pages_and_gaps():
    core = router(member("a"))
    hashes = chain_hashes(root_hash(), PROMPT, PAGE)
    core.handle(CacheChanged("a", stored(PROMPT)))
    core.handle(CacheChanged("a", CacheEvents(events=[PageRemoved(group="g", page_hashes=[*hashes[3:], b"?"])])))
    assert overlap(core) == 12
    core.handle(CacheChanged("a", CacheEvents(events=[CacheCleared(group="g"), *stored(PROMPT[:4]).events])))
    assert overlap(core) == 4
    core.handle(CacheUnknown("a"))
    assert (overlap(core), core.num_indexed_pages) == (0, 0)


def test_index_is_bounded_and_forgets_the_oldest():
    core = router(member("a"), max_pages=3)
    core.handle(CacheChanged("a", stored(PROMPT[:12])))
    core.handle(CacheChanged("a", stored(PROMPT[:4])))
    core.handle(CacheChanged("a", stored([7] * 4)))
    assert core.num_indexed_pages == 3
    assert overlap(core) == 4


def test_prefill_is_chosen_for_a_decode_scheduler():
    core = router(member("d", phase="decode"), member("p0", phase="prefill"), member("p1", phase="prefill"))
    core.handle(CacheChanged("p1", stored(PROMPT)))
    route = choose(core)
    assert (route.decode, route.prefill) == ("d", "p1")
    core.handle(LoadChanged("p1", load(num_waiting_tokens=10_000)))
    assert choose(core).prefill == "p0"


def test_no_prefill_scheduler_worth_naming():
    core = router(member("d", phase="decode"), member("p", phase="prefill"))
    assert choose(core, excluded=["p"]).prefill == ""
    core = router(member("d", phase="decode"), member("p", phase="prefill", worker_ready=False))
    assert choose(core).prefill == ""
    core = router(member("d", phase="decode"), member("p", phase="prefill", state="draining"))
    assert choose(core).prefill == ""
    core = router(member("m"), member("p", phase="prefill"))
    assert choose(core) == choose(core)
    assert (choose(core).decode, choose(core).prefill) == ("m", "")


def test_no_prefill_scheduler_whose_pool_is_smaller_than_the_prompt_is_named():
    core = router(member("d", phase="decode"), member("p", phase="prefill"))
    page_size = member("p").attributes["page_size"]
    prompt = list(range(4 * page_size))
    for num_pages, named in ((4, "p"), (3, "")):
        core.handle(LoadChanged("p", load(num_pages=num_pages)))
        route = core.choose("r", prompt, "", (), 0.0)
        assert (route.decode, route.prefill) == ("d", named)


def test_a_lone_prefill_group_decodes():
    core = router(member("p", phase="prefill"))
    assert (choose(core).decode, choose(core).prefill) == ("p", "")
    core = router(member("d", phase="decode"), member("p", phase="prefill"))
    assert choose(core, excluded=["d"]).decode == "p"


def test_excluded_ones_are_the_last_resort():
    core = router(member("a"), member("b"))
    assert {choose(core, f"r{i}", excluded=["a"]).decode for i in range(9)} == {"b"}
    route = choose(core, excluded=["a", "b", "detok-0", "detok-1"])
    assert route.decode in ("a", "b")
    assert route.detokenizer in ("detok-0", "detok-1")
    assert {choose(core, f"r{i}", excluded=["detok-0"]).detokenizer for i in range(9)} == {"detok-1"}


def test_a_scheduler_without_its_worker_is_avoided():
    core = router(member("a", worker_ready=False), member("b"))
    core.handle(LoadChanged("b", load(num_waiting=100)))
    assert choose(core).decode == "b"


def test_nobody_there_is_told_as_such():
    core = router()
    with pytest.raises(NoCapacity, match="scheduler"):
        choose(core)
    core.handle(MembersChanged([member("a")]))
    with pytest.raises(NoCapacity, match="detokenizer"):
        choose(core)
    core.handle(MembersChanged([member("a", state="draining"), *DETOKENIZERS]))
    with pytest.raises(NoCapacity) as caught:
        choose(core)
    assert caught.value.retryable


@pytest.mark.parametrize("attributes", [{"page_size": 0}, {"page_size": "16"}, {"phase": 3}])
def test_a_scheduler_with_strange_attributes_is_not_used(attributes):
    core = router(member("a", **attributes), member("b"))
    assert {choose(core, f"r{i}").decode for i in range(9)} == {"b"}


def test_schedulers_are_followed_and_forgotten():
    core = RoutingCore(RoutingLimits())
    assert core.handle(MembersChanged([member("b"), member("a", state="starting"), *DETOKENIZERS])) == [
        Follow("a"),
        Follow("b"),
    ]
    core.handle(CacheChanged("a", stored(PROMPT)))
    assert core.handle(MembersChanged([member("a"), *DETOKENIZERS])) == [Unfollow("b")]
    assert overlap(core) == 20
    for event in (CacheChanged("b", stored(PROMPT)), CacheUnknown("b"), LoadChanged("b", load())):
        assert core.handle(event) == []
    assert core.handle(MembersChanged([member("a", "gateway")])) == [Unfollow("a")]
    assert core.num_indexed_pages == 0


def test_detokenizer_stays_while_others_come_and_go():
    core = router(member("a"))
    before = {f"r{i}": choose(core, f"r{i}").detokenizer for i in range(40)}
    assert set(before.values()) == {"detok-0", "detok-1"}
    core.handle(MembersChanged([member("a"), *DETOKENIZERS, member("detok-2", "detokenizer")]))
    after = {request_id: choose(core, request_id).detokenizer for request_id in before}
    assert all(after[r] in (before[r], "detok-2") for r in before)


NAMES = st.sampled_from(["a", "b", "c", "d"])
MEMBERS = st.lists(
    st.builds(
        member, NAMES, state=st.sampled_from(["ready", "ready", "draining", "starting"]),
        phase=st.sampled_from(["prefill", "decode", "mixed"]), worker_ready=st.booleans(),
    ),
    unique_by=lambda m: m.actor_id,
)  # fmt: skip
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=18)
EVENTS = st.lists(
    st.one_of(
        st.builds(MembersChanged, MEMBERS),
        st.builds(CacheChanged, NAMES, st.builds(stored, IDS)),
        st.builds(CacheUnknown, NAMES),
        st.builds(
            LoadChanged, NAMES,
            st.builds(load, num_running=st.integers(0, 9), num_free_pages=st.integers(0, 5)),
        ),
    ),
    max_size=25,
)  # fmt: skip


@given(MEMBERS, EVENTS, IDS, st.sets(NAMES, max_size=4), st.text(max_size=4))
def test_every_choice_is_sound_and_repeatable(members, events, token_ids, excluded, request_id):
    first, second = router(*members, max_pages=8), router(*members, max_pages=8)
    current, followed = {m.actor_id: m for m in members}, {m.actor_id for m in members}
    for event in events:
        if isinstance(event, MembersChanged):
            event = MembersChanged([*event.members, *DETOKENIZERS])
            current = {m.actor_id: m for m in event.members if m.role == "scheduler"}
        for command in first.handle(event):
            assert (command.scheduler in followed) == isinstance(command, Unfollow)
            followed ^= {command.scheduler}
        second.handle(event)
    assert followed == set(current)
    assert first.num_indexed_pages <= 8 * len(current)

    ready = {name for name, m in current.items() if m.state == "ready"}
    if not ready:
        with pytest.raises(NoCapacity):
            choose(first, request_id, token_ids, excluded=excluded)
        return
    route = choose(first, request_id, token_ids, excluded=excluded)
    assert route == choose(second, request_id, token_ids, excluded=excluded)
    assert route.decode in ready
    assert route.decode not in excluded or ready <= excluded
    phase = current[route.decode].attributes["phase"]
    usable = {n for n in ready - excluded if current[n].attributes["worker_ready"]}
    if phase == "prefill":
        assert not any(current[n].attributes["phase"] != "prefill" for n in usable)
    prefills = {n for n in usable if current[n].attributes["phase"] == "prefill"}
    assert (route.prefill in prefills) if phase == "decode" and prefills else route.prefill == ""
    cached = _overlaps([first.schedulers[route.decode]], token_ids, "")[route.decode]
    assert 0 <= cached < len(token_ids)
    assert cached % PAGE == 0


def test_groups_whose_memory_is_released_are_passed_over_and_told_of():
    sleeping, awake = member("a", state="released"), member("b")
    assert choose(router(sleeping, awake)).decode == "b"
    with pytest.raises(MemoryReleased) as caught:
        choose(router(sleeping, member("c", state="starting")))
    assert (caught.value.code, caught.value.retryable) == ("memory_released", True)
    with pytest.raises(NoCapacity) as caught:
        choose(router(member("c", state="starting")))
    assert caught.value.code == "no_capacity"


def test_a_request_with_output_goes_on_under_equal_numerics_whatever_the_load_and_with_others_where_there_are_none():
    core = router(member("a", numerics="x"), member("b", numerics="y"), member("c"))
    core.handle(LoadChanged("b", load(num_running=50)))
    assert {choose(core, f"r{i}", numerics="y").decode for i in range(9)} == {"b"}
    assert "b" not in {choose(core, f"r{i}", now=9.0).decode for i in range(9)}, "a first attempt has no bits to keep"
    assert choose(core, numerics="y", excluded=["b"]).decode in ("a", "c"), "it has just failed there"
    assert choose(core, numerics="z", now=18.0).decode in ("a", "c"), "nobody has them: load decides"
    waits = member("b", numerics="y", worker_ready=False)
    core.handle(MembersChanged([member("a", numerics="x"), waits, *DETOKENIZERS]))
    assert choose(core, numerics="y").decode == "a", "there it would wait for a worker"


def test_the_prefill_scheduler_of_a_later_attempt_has_equal_numerics_too():
    core = router(
        member("d", phase="decode", numerics="y"),
        member("p", phase="prefill", numerics="x"),
        member("q", phase="prefill", numerics="y"),
    )
    core.handle(LoadChanged("q", load(num_running=50)))
    assert choose(core).prefill == "p"
    route = choose(core, numerics="y", now=9.0)
    assert (route.decode, route.prefill) == ("d", "q")
    assert choose(core, numerics="y", excluded=["q"], now=18.0).prefill == "p", "another one is better than none"


def test_a_request_with_output_goes_on_with_equal_weights_alone() -> None:
    core = router(member("a", weights="v", numerics="x"), member("b", weights="w", numerics="y"))
    assert choose(core, numerics="x").decode == "a"
    assert choose(core, weights="w", numerics="x").decode == "b"
    waits = member("b", weights="w", numerics="y", worker_ready=False)
    core.handle(MembersChanged([member("a", weights="v", numerics="x"), waits, *DETOKENIZERS]))
    assert choose(core, weights="w", numerics="x").decode == "b", "it waits for its worker there"
    core.handle(MembersChanged([member("a", weights="v", numerics="x"), member("c", numerics="x"), *DETOKENIZERS]))
    with pytest.raises(NoCapacity, match="weights"):
        choose(core, weights="w", numerics="x")


def test_nobody_prefills_for_a_group_of_other_weights() -> None:
    """Its pages would be refused when they come, after they were computed."""
    decodes = member("d", phase="decode", weights="w")
    others = [member("p", phase="prefill", weights="v"), member("q", phase="prefill")]
    core = router(decodes, *others)
    assert choose(core).prefill == ""
    core.handle(MembersChanged([decodes, *others, member("r", phase="prefill", weights="w"), *DETOKENIZERS]))
    core.handle(LoadChanged("r", load(num_running=50)))
    assert choose(core, now=9.0).prefill == "r"


def test_a_scheduler_whose_link_is_lost_is_the_last_choice_until_it_is_heard_again() -> None:
    decode, prefill = member("d", phase="decode"), member("p", phase="prefill")
    core = router(decode, prefill)
    assert (choose(core).decode, choose(core).prefill) == ("d", "p")
    core.handle(LinkLost(Address("d", 1), 10.0))
    assert choose(core, now=10.1).decode == "p", "it stands in"
    assert choose(core, now=10.1, excluded=["p"]).decode == "d"
    core.handle(LoadChanged("d", load()))
    assert choose(core, now=10.2).decode == "d"
    core.handle(LinkLost(Address("p", 1), 11.0))
    core.handle(LinkLost(Address("gw", 1), 11.0))
    assert (choose(core, now=11.1).decode, choose(core, now=11.1).prefill) == ("d", "")
    assert choose(core, now=16.0).prefill == "p", "nobody says that it is gone"
    core.handle(LinkLost(Address("d", 1), 20.0))
    core.handle(MembersChanged([msgspec.structs.replace(decode, epoch=2), prefill, *DETOKENIZERS]))
    assert choose(core, now=20.1).decode == "d", "the next one is there"
    core.handle(LinkLost(Address("d", 1), 20.2))
    assert choose(core, now=20.3).decode == "d", "late news"


def test_only_groups_that_can_do_what_a_request_asks_of_its_draws_are_chosen() -> None:
    core = router(
        member("d", phase="decode", asks=["a/1", "b/1"]),
        member("e", phase="decode", asks=["a/2"]),
        member("p", phase="prefill", asks=["a/1"]),
        member("q", phase="prefill", asks=["a/1", "b/1"]),
    )
    core.handle(LoadChanged("q", load(num_running=50)))
    route = core.choose("r", [1, 2, 3], "", [], 0.0, asks=["b/1", "a/1"])
    assert (route.decode, route.prefill) == ("d", "q")
    assert core.choose("r", [1, 2, 3], "", ["d"], 0.0, asks=["b/1"]).decode == "q", "it stands in, and not e"
    assert core.choose("r", [1, 2, 3], "", ["q"], 0.0, asks=["b/1"]).prefill == ""
    with pytest.raises(UnsupportedAsk, match="'c'") as raised:
        core.choose("r", [1], "", [], 0.0, asks=["a/1", "c/1"])
    assert (raised.value.param, raised.value.retryable) == ("c", False)
    with pytest.raises(UnsupportedAsk, match="together"):
        core.choose("r", [1], "", [], 0.0, asks=["a/2", "b/1"])


def test_a_group_that_could_do_what_a_request_asks_is_waited_for_while_it_is_away() -> None:
    old = [member("e", phase="decode", asks=["a/1"]), member("p", phase="prefill", asks=["a/1"])]
    core = router(member("d", phase="decode", asks=["a/1", "b/1"]), *old)

    def ask(now: float) -> None:
        core.choose("r", [1], "", [], now, asks=["b/1"])

    core.handle(MembersChanged([member("d", state="starting", phase="decode"), *old, *DETOKENIZERS]))
    with pytest.raises(NoCapacity, match="'b'"):
        ask(1000.0)
    core.handle(MembersChanged([*old, *DETOKENIZERS]))
    for now in (2000.0, 2059.0):
        with pytest.raises(NoCapacity, match="'b'"):
            ask(now)
    with pytest.raises(UnsupportedAsk):
        ask(2060.0)
    core.handle(MembersChanged([member("d", phase="decode", asks=["b/1"]), *old, *DETOKENIZERS]))
    ask(2061.0)
    core.handle(MembersChanged([*old, *DETOKENIZERS]))
    with pytest.raises(NoCapacity):
        ask(3000.0)


def test_a_prefill_group_that_stands_in_does_not_say_for_the_mesh_what_can_be_asked() -> None:
    core = router(member("p", phase="prefill", asks=["a/1"]))
    with pytest.raises(NoCapacity, match="'b'"):
        core.choose("r", [1], "", [], 0.0, asks=["b/1"])


def test_few_groups_that_have_left_are_remembered() -> None:
    core = router(*(member(f"d{number}", phase="decode", asks=["b/1"]) for number in range(MAX_LEFT + 5)))
    core.handle(MembersChanged([member("e", phase="decode"), *DETOKENIZERS]))
    assert len(core._could) == MAX_LEFT + 1


def test_a_vector_goes_straight_to_a_group_that_prefills_and_needs_no_detokenizer():
    able = {"asks": [VECTORS]}
    core = RoutingCore(RoutingLimits())
    groups = [member("d", phase="decode", **able), member("p", phase="prefill", **able), member("old", phase="mixed")]
    core.handle(MembersChanged(groups))
    route = core.choose("r", PROMPT, "", (), 0.0, asks=[VECTORS])
    assert (route.decode, route.prefill, route.detokenizer) == ("p", "", "")
    # Any group serves any phase when the other is gone.
    assert core.choose("r", PROMPT, "", ["p"], 0.0, asks=[VECTORS]).decode == "d"
    core.handle(MembersChanged([member("d", phase="decode", **able)]))
    assert core.choose("r", PROMPT, "", (), 0.0, asks=[VECTORS]).decode == "d"
    # What the client would have to change is no field.
    with pytest.raises(UnsupportedAsk, match="no worker group of this mesh can make vectors") as raised:
        router(member("old")).choose("r", PROMPT, "", (), 0.0, asks=[VECTORS])
    assert raised.value.param is None
