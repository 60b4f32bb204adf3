"""Who is told that worker groups of one mesh compute different bits."""

from types import SimpleNamespace

import pytest
import structlog
from structlog.testing import capture_logs

from mesh.address import Endpoint
from mesh.membership.view import Member, Membership
from nodes.gateway.config import GatewayConfig
from nodes.gateway.page.shown import mesh_shown
from nodes.gateway.requests.events import SchedulersChanged
from nodes.gateway.requests.scheduler_view import SchedulerView
from nodes.numerics import Bits, kernels_note, numerics_note, quantization_note, scheduler_bits, weights_note

NOTE = "worker groups compute with different numerics, so their results are not bit-identical: g-a, g-c (x); g-b (<y>)"


def member(name: str, numerics: str = "", role: str = "scheduler", state: str = "ready", **attributes: str) -> Member:
    known = {"group": f"g-{name}", "numerics": numerics} | attributes
    return Member(actor_id=name, role=role, epoch=1, endpoint=Endpoint("", ""), state=state, attributes=known)


UNEQUAL = [member("a", "x"), member("b", "<y>"), member("c", "x"), member("d"), member("w", "z", role="worker")]


@pytest.mark.parametrize("members", [[], [member("a", "x"), member("b", "x"), member("c")], [member("a", "x")]])
def test_equal_numerics_and_those_that_nobody_tells_are_no_news(members: list[Member]) -> None:
    assert numerics_note(members) == ""


def test_unequal_groups_are_named_with_what_they_have() -> None:
    assert numerics_note(UNEQUAL) == NOTE


def test_groups_of_unequal_weights_are_named() -> None:
    members = [member("a", "x", weights="w"), member("b", "x", weights="v"), member("c", "x")]
    assert weights_note(members) == (
        "worker groups serve different weights, so they exchange no KV and answers differ: g-a (w); g-b (v)"
    )
    assert weights_note(members[1:]) == numerics_note(members) == ""
    assert scheduler_bits(members) == {"a": Bits("w", "x"), "b": Bits("v", "x"), "c": Bits("", "x")}


def test_slow_kernels_are_told_once() -> None:
    slow = [member(f"w{number}", role="worker", kernels="torch kernels: no compiler") for number in range(2)]
    assert kernels_note([*slow, member("w3", role="worker", kernels=""), *UNEQUAL]) == "torch kernels: no compiler"
    assert kernels_note(UNEQUAL) == ""


def test_rounded_weights_are_told_once_and_at_the_root() -> None:
    workers = [member(f"w{number}", role="worker", quantization="int8") for number in range(2)]
    assert quantization_note(workers) == "weights are int8, rounded when they were loaded"
    assert quantization_note([member("w", role="worker", quantization="none"), *UNEQUAL]) == ""
    config = GatewayConfig(model_name="m", context_length=100)
    notes = mesh_shown(config, "g", 1.0, workers, [], []).notes
    assert notes == ["weights are int8, rounded when they were loaded"]


def test_the_page_at_the_root_says_which_groups_have_unequal_numerics() -> None:
    config = GatewayConfig(model_name="m", context_length=100)
    assert mesh_shown(config, "g", 1.0, UNEQUAL, [], []).notes == [NOTE]
    assert mesh_shown(config, "g", 1.0, UNEQUAL[:1], [], []).notes == []


def test_a_gateway_is_told_all_numerics_and_logs_unequal_ones_once() -> None:
    view = Membership()
    schedulers = SchedulerView(SimpleNamespace(members=view, log=structlog.get_logger()))
    drains = member("b", "<y>", state="draining")
    with capture_logs() as lines:
        for number, members in enumerate(([member("a", "x")], UNEQUAL, [member("a", "x", phase="prefill"), drains]), 1):
            view.reset(1, number, members)
            told = schedulers.changed()
    assert told == SchedulersChanged({"a": 1}, frozenset({"a"}), {"a": Bits("", "x"), "b": Bits("", "<y>")})
    assert [(line["event"], line["note"]) for line in lines] == [("unequal_numerics", NOTE)]
