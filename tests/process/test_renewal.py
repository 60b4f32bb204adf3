"""`meshctl restart` and `meshctl drain` while clients are served."""

import pytest

from tests.process.load import Load

pytestmark = pytest.mark.process

ROLES = ["tokenizer", "detokenizer", "scheduler", "worker", "kv_agent", "registry", "gateway"]


def load_of(host):
    def ask(number, count):
        text = f"client {number} says {count} " + "and goes on " * 8
        return host.say(text), text

    return Load(host, ask, forgives_resets=True)


def test_every_role_is_restarted_under_load(host):
    mesh = host.up("--model", "echo", "--gateways", "2")
    before = host.ps()
    with load_of(host) as load:
        load.more()
        renewed = host.meshctl("restart", *ROLES)
        assert renewed.returncode == 0, renewed.stderr
        load.more()
    assert load.wrong == []
    after = host.ps()
    for actor_id in before.keys() - {"supervisor"}:
        now = after[actor_id]
        assert (now["epoch"], now["num_restarts"]) == (before[actor_id]["epoch"] + 1, 0)
        assert (now["num_deaths"], now["num_requested_restarts"]) == (0, 1)
    host.ends_well(mesh)


@pytest.mark.slow
def test_a_drained_group_stays_away_and_the_other_one_serves(host):
    host.up("--model", "echo?step_ms=5")
    group = ["scheduler-decode-0", "worker-decode-0"]
    with load_of(host) as load:
        # What the worker alone had in hand is not kept for it: it is said to stay away.
        for drained in (group[1:], group):
            load.more()
            ended = host.meshctl("drain", *drained)
            assert ended.returncode == 0, ended.stderr
            assert [host.ps()[actor_id]["state"] for actor_id in drained] == ["drained"] * len(drained)
            assert ended.stderr.count("(drained, as requested)") == len(drained)
            load.more()
            assert host.meshctl("restart", *drained).returncode == 0
            load.more()
    assert load.wrong == []
    assert load.slowest_s < 12, "of a worker that may only be renewed it would have been drained_wait_s"
    unknown = host.meshctl("drain", "nobody")
    assert unknown.returncode == 2
    assert "there is no actor or role nobody" in unknown.stderr
    stopped = host.meshctl("down")
    assert stopped.returncode == 0, stopped.stderr
    host.assert_nothing_left()
