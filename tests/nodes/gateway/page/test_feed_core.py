"""Who is asked when, and which page is told what, without a mesh."""

from typing import Any

import msgspec

from mesh.address import Address
from mesh.wire.frames import History
from nodes.gateway.page.core import MAX_CALLS, MAX_DEATHS, MAX_PAGES, FeedCore
from nodes.gateway.page.shown import CallShown, DeathShown, MeshShown, SampleShown, call_shown, samples_shown
from nodes.protocol.records import CallRecord

STATE = MeshShown(
    now=1.0, gateway="g0", model="m", context="c", missing=[], notes=[], silent=[], actors=[]
)  # fmt: skip
D1, D2 = Address("d", 1), Address("d", 2)


def sample(number: int, epoch: int = 1) -> SampleShown:
    return SampleShown(actor="d", epoch=epoch, number=number, at=float(number), figures={"running": 1.0})


def call(name: str, at: float = 0.0) -> CallShown:
    return call_shown(CallRecord(name, at=at, total_s=1.0))


def told(core: FeedCore, page: int) -> Any:
    data = core.take(page)
    return None if data is None else msgspec.json.decode(data)


def numbers(event: Any) -> list[tuple[int, int]]:
    return [(one["epoch"], one["number"]) for one in event["samples"]]


def test_nothing_is_asked_while_no_page_is_open_and_once_a_second_for_all() -> None:
    core = FeedCore()
    assert core.due(5.0) is None
    first = core.open()
    assert (first, core.due(5.0)) == (1, 0.0)
    core.begin(5.0)
    second = core.open()
    assert core.due(5.0) is None, "a round is under way, for both"
    core.gathered(STATE, {}, [])
    core.end()
    assert (core.due(5.25), core.due(9.0)) == (0.75, 0.0)
    assert core.take(1) == core.take(2) is not None
    assert core.take(1) is None, "nothing is new"
    core.begin(6.0)
    core.end()
    assert core.due(6.5) == 0.5
    core.close(1)
    core.close(1)
    assert second == 2
    core.close(2)
    assert core.due(9.0) is None
    third = core.open()
    assert third == 3
    assert core.take(3) is None, "what was known then is old now"


def test_a_page_is_told_what_is_new_and_one_that_was_slow_all_that_it_missed() -> None:
    core = FeedCore()
    quick, slow = core.open(), core.open()
    assert quick is not None
    assert slow is not None
    core.gathered(STATE, {D1: [sample(1), sample(2)]}, [call("a")])
    assert core.numbers == {D1: 2}
    assert numbers(told(core, quick)) == [(1, 1), (1, 2)]
    core.gathered(STATE, {D1: [sample(2), sample(3)]}, [call("a"), call("b")])
    event = told(core, quick)
    assert (numbers(event), [one["id"] for one in event["calls"]]) == ([(1, 3)], ["b"])
    core.gathered(STATE, {D1: []}, [])
    event = told(core, quick)
    assert (event["samples"], event["calls"]) == ([], [])
    event = told(core, slow)
    assert (numbers(event), [one["id"] for one in event["calls"]]) == ([(1, 1), (1, 2), (1, 3)], ["a", "b"])
    late = core.open()
    assert late is not None
    assert numbers(told(core, late)) == numbers(event), "without another ask"


def test_a_death_takes_its_own_samples_and_those_of_its_successor_begin_anew() -> None:
    core = FeedCore()
    page = core.open()
    assert page is not None
    core.gathered(STATE, {D1: [sample(7)], Address("e", 1): [sample(1)]}, [])
    death = DeathShown(actor="d", epoch=1, at=1.0, reason="killed")
    core.gathered(STATE, {D2: [sample(1, 2)], Address("e", 1): []}, [], [death])
    assert core.numbers == {D2: 1, Address("e", 1): 1}
    event = told(core, page)
    assert sorted(numbers(event)) == [(1, 1), (2, 1)]
    (told_death,) = event["deaths"]
    assert (told_death["actor"], told_death["epoch"], told_death["reason"]) == ("d", 1, "killed")
    core.gathered(STATE, {}, [], [msgspec.structs.replace(death, at=1.1, reason="as another gateway heard it")])
    assert told(core, page)["deaths"] == []


def test_pages_calls_and_deaths_are_bounded() -> None:
    core = FeedCore()
    deaths = [DeathShown(actor=f"a{number}", epoch=1, at=float(number), reason="") for number in range(100)]
    pages = [core.open() for _ in range(MAX_PAGES)]
    assert None not in pages
    assert core.open() is None
    core.close(pages[3] or 0)
    page = core.open()
    assert page is not None
    calls = [call(f"c{number}", at=number) for number in range(2 * MAX_CALLS, 0, -1)]
    core.gathered(STATE, {}, calls, deaths)
    event = told(core, page)
    assert [one["actor"] for one in event["deaths"]] == [f"a{number}" for number in range(100 - MAX_DEATHS, 100)]
    ids = [one["id"] for one in event["calls"]]
    assert (ids[0], ids[-1], len(ids)) == (f"c{MAX_CALLS + 1}", f"c{2 * MAX_CALLS}", MAX_CALLS), "the newest"
    for one in (*pages, page):
        core.close(one or 0)
    core.gathered(STATE, {D1: [sample(1)]}, [])
    assert (core.num_pages, core.numbers) == (0, {}), "an answer that comes when nobody is left"
    again = core.open()
    core.gathered(STATE, {}, [])
    assert told(core, again or 0)["deaths"] == []


def test_history_is_shown_by_figures_and_a_peer_s_nonsense_is_left_out() -> None:
    columns = {
        "mesh_scheduler_num_waiting": [1.0, 2.0], "mesh_scheduler_num_handoffs": [1.0, -1.0], "other": [5.0, 5.0],
        "mesh_time_to_first_token_seconds": [-1.0, 0.25], "mesh_scheduler_kv_usage_ratio": [0.5],
    }  # fmt: skip
    one, two = samples_shown("d", 3, History(number=9, ages_s=[6.0, 1.0], columns=columns), 100.0)
    assert (one.number, one.at, one.figures) == (8, 94.0, {"waiting": 2.0, "kv_usage": 0.5})
    assert (two.number, two.at, two.figures) == (9, 99.0, {"waiting": 2.0, "first_token_s": 0.25})


def test_a_call_is_shown_without_the_names_of_its_key_and_client() -> None:
    record = CallRecord(
        "r", gateway="g", at=1.0, route="/v1/x", client_id="mine", key="alice", traceparent="00-1", total_s=2.0,
        read_s=0.5, status=200,
    )  # fmt: skip
    shown = msgspec.json.encode(call_shown(record))
    assert not any(name in shown for name in (b"mine", b"alice", b"00-1"))
    (spans,) = msgspec.json.decode(shown)["samples"]
    assert [tuple(one[:3]) for one in spans["spans"]] == [("body", 0.0, 0.5), ("tokenizer", 0.5, 2.0)]
