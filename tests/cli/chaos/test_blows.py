"""Which blows fall on whom: by the seed alone, on whoever was meant, and never on who must not be struck."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.chaos.blows import HTTP, KINDS, Blow, Blows, NoTarget, garbage, kinds_in
from cli.errors import WrongUsage

MESH = {
    "supervisor": "supervisor",
    "registry": "registry",
    "gateway-0": "gateway",
    "gateway-1": "gateway",
    "tokenizer-0": "tokenizer",
    "kv-agent-0": "kv_agent",
    **{f"worker-mixed-{number}": "worker" for number in range(6)},
    **{f"scheduler-mixed-{number}": "scheduler" for number in range(6)},
}
SPARED = {"supervisor", "gateway-0", "gateway-1", HTTP}


def dealt(blows: Blows, number: int = 400) -> list[Blow]:
    return [blows.next() for _ in range(number)]


@given(st.integers(0, 2**32), st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
def test_a_seed_is_a_series_whatever_order_actors_are_listed_in(seed, kinds) -> None:
    listed_otherwise = dict(reversed(MESH.items()))
    assert dealt(Blows(seed, kinds, MESH), 50) == dealt(Blows(seed, kinds, listed_otherwise), 50)
    assert {blow.kind for blow in dealt(Blows(seed, kinds, MESH), 100)} == set(kinds)


def test_another_seed_is_another_series() -> None:
    assert dealt(Blows(1, KINDS, MESH)) != dealt(Blows(2, KINDS, MESH))


@given(st.integers(0, 2**32))
def test_gateways_and_supervisor_get_no_signal_unless_a_gateway_is_named(seed) -> None:
    for blow in dealt(Blows(seed, KINDS, MESH), 100):
        assert blow.kind not in ("kill", "stop") or blow.target not in SPARED
        assert blow.kind != "slow" or blow.target == HTTP
    named = [
        blow.target for blow in dealt(Blows(seed, ("kill", "stop"), MESH, ["gateway", "supervisor", "registry"]), 100)
    ]
    assert {*named} == {"gateway-0", "gateway-1", "registry"}, "a supervisor's death is the mesh's"


def test_each_kind_and_each_role_has_its_share_however_many_actors_it_has() -> None:
    blows = dealt(Blows(7, KINDS, MESH), 4000)
    kinds = Counter(blow.kind for blow in blows)
    assert all(800 < kinds[kind] < 1200 for kind in KINDS)
    roles = Counter(MESH[blow.target] for blow in blows if blow.kind == "kill")
    assert set(roles) == {"registry", "tokenizer", "kv_agent", "worker", "scheduler"}
    assert all(120 < number < 300 for number in roles.values())


def test_stops_are_dealt_on_both_sides_of_what_a_supervisor_waits_for() -> None:
    lasts_s = [blow.lasts_s for blow in dealt(Blows(7, ["stop"], MESH))]
    assert min(lasts_s) < 0.5
    assert max(lasts_s) > 3.5


def test_only_those_that_are_named_by_role_or_id() -> None:
    blows = Blows(1, KINDS, MESH, ["worker-mixed-3", "kv_agent"])
    assert {blow.target for blow in dealt(blows)} == {"worker-mixed-3", "kv-agent-0"}
    assert blows.signalled == ["kv-agent-0", "worker-mixed-3"]
    assert Blows(1, ["garbage"], MESH).signalled == []


@pytest.mark.parametrize(
    ("kinds", "only", "says"),
    [
        (KINDS, ["workers"], "no workers"),
        (["kill"], ["supervisor"], "the mesh's"),
        (["slow"], ["worker"], "slow readers"),
    ],
)
def test_nobody_to_strike_is_said(kinds, only, says) -> None:
    with pytest.raises(NoTarget, match=says):
        Blows(1, kinds, MESH, only)


def test_kinds_are_read_as_they_are_typed() -> None:
    assert kinds_in("stop,kill") == ["kill", "stop"]
    for text in ("", "kill,burn"):
        with pytest.raises(WrongUsage, match="no kind of blow"):
            kinds_in(text)


def test_garbage_is_the_seeds_and_is_of_many_kinds() -> None:
    for http in (False, True):
        assert garbage(3, http=http) == garbage(3, http=http)
        assert len({garbage(seed, http=http)[:16] for seed in range(200)}) > 20
    begins = [garbage(seed, http=False)[:10] for seed in range(100)]
    assert any(begin.startswith(b"\xff" + bytes(8) + b"\x7f") for begin in begins), "some begins as ZMTP does"
    assert any(begin.startswith(b"GET /") for begin in begins), "some is HTTP"
