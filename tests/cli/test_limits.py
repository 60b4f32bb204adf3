"""What a mesh needs of the system's limits, and what is said where it has less."""

import pytest

from cli.errors import CliError, LimitTooLow, limit_too_low
from cli.exit_codes import FATAL_EXITS, ExitCode
from cli.plan.limits import LEAST, Load, needs, num_connections, require, shortfalls
from cli.plan.settings import Settings
from cli.plan.topology import plan_topology
from mesh.runtime.process_limits import (
    ADDRESS_SPACE,
    FILE_SIZE,
    FILES,
    LIMITS,
    PROCESSES,
    STACK,
    TASKS,
    Limits,
)
from nodes.model_spec import resolve_model
from tests.cli.launches import MACHINE

MIXED = [
    (role, role) for role in ("registry", "gateway", "kv_agent", "tokenizer", "detokenizer", "worker", "scheduler")
]


def load(actors=MIXED, *, elsewhere=0, threads=2, pools=(), uses_torch=True):
    return Load(actors, elsewhere, threads, pools, uses_torch)


def amounts(*arguments, **keywords):
    return {need.limit: need.amount for need in needs(Settings(), load(*arguments, **keywords))}


def test_each_need_is_of_a_limit_that_is_known_once():
    for needed in (LEAST, needs(Settings(), load())):
        limits = [need.limit for need in needed]
        assert len(set(limits)) == len(limits)
        assert set(limits) <= set(LIMITS)


def test_more_actors_and_threads_need_more():
    few, groups = amounts(), amounts([*MIXED, ("worker-1", "worker"), ("scheduler-1", "scheduler")])
    # Ten of a peer; six and four of the actors themselves, and two that compute.
    assert groups[FILES] - few[FILES] == 20
    assert groups[TASKS] - few[TASKS] == groups[PROCESSES] - few[PROCESSES] == 12
    assert amounts(elsewhere=9)[FILES] - few[FILES] == 90
    assert amounts(threads=8)[TASKS] - few[TASKS] == 6


def test_pools_count_as_files_and_as_address_space():
    few, large = amounts(), amounts(pools=(1 << 30, 2 << 30))
    assert large[ADDRESS_SPACE] - few[ADDRESS_SPACE] == 3 << 30
    assert large[FILE_SIZE] == 2 << 30
    assert few[ADDRESS_SPACE] > amounts(uses_torch=False)[ADDRESS_SPACE]


def test_who_needs_most_is_named():
    (files,) = (need for need in needs(Settings(), load()) if need.limit is FILES)
    assert (files.amount, files.why) == (199, "gateway takes so many for 7 peers")


@pytest.mark.parametrize(("value", "is_short"), [(0, True), (198, True), (199, False), (65_536, False)])
def test_a_limit_is_too_low_or_enough(value, is_short):
    limits = Limits({FILES: value}, {})
    found = shortfalls(needs(Settings(), load()), limits)
    assert bool(found) == is_short
    if is_short:
        with pytest.raises(LimitTooLow, match="open files") as caught:
            require(needs(Settings(), load()), limits)
        assert f"`ulimit -n` is {value}, and 199 are needed" in caught.value.why
        assert "raise it to 199 or more: `ulimit -n N`, systemd: LimitNOFILE=N" in caught.value.do
        assert caught.value.exit_code == ExitCode.LIMIT_TOO_LOW


def test_what_others_have_is_needed_besides():
    (short,) = shortfalls(needs(Settings(), load()), Limits({PROCESSES: 100}, {PROCESSES: 80}))
    assert "is 100, of which others have 80, and 50 are needed" in short.found
    assert "raise it to 130 or more" in short.do


def test_no_limit_is_enough():
    assert shortfalls([*LEAST, *needs(Settings(), load())], Limits({}, {})) == []
    assert num_connections(Limits({}, {}), 7) is None


def test_connections_are_what_is_left():
    assert num_connections(Limits({FILES: 199}, {}), 7) == 1
    assert num_connections(Limits({FILES: 64}, {}), 7) == 0
    assert num_connections(Limits({FILES: 1024}, {}), 7) == 826


def test_a_topology_says_what_it_needs():
    topology = plan_topology(Settings(model="tiny", mixed=1), resolve_model("tiny"), "tiny", MACHINE)
    amount = {need.limit: need.amount for need in topology.needs}
    assert amount[FILES] == 199
    assert amount[ADDRESS_SPACE] == (1 << 30) + topology.pool_bytes
    assert amount[STACK] == 256 << 10


def test_an_error_of_ours_counts_only_for_what_led_to_it():
    full = OSError(24, "Too many open files")
    wrapped = CliError("it cannot be written", why=str(full), do="make room")
    assert limit_too_low("it", wrapped) is None, "its words are not the system's"
    wrapped.__cause__ = full
    told = limit_too_low("the mesh could not be started", wrapped)
    assert told is not None
    assert "the limit of open files" in told.why
    assert limit_too_low("it", told) is None
    assert limit_too_low("it", KeyError("x")) is None
    assert ExitCode.LIMIT_TOO_LOW in FATAL_EXITS
