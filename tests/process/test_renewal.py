"""`meshctl restart` and `meshctl drain` while clients are served."""

import threading
import time
import urllib.error

import pytest

pytestmark = pytest.mark.process

ROLES = ["tokenizer", "detokenizer", "scheduler", "worker", "kv_agent", "registry", "gateway"]


class Load:
    """Clients that ask one thing after the other; whatever is not the right answer is kept."""

    def __init__(self, host, num_clients=4):
        self._host = host
        self._over = threading.Event()
        self.num_answers = 0
        self.slowest_s = 0.0
        self.wrong = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number):
        while not self._over.is_set():
            text = f"client {number} says {self.num_answers} " + "and goes on " * 8
            began = time.monotonic()
            try:
                answer = self._host.say(text)
            except urllib.error.HTTPError as error:
                self.wrong.append(f"{error}: {error.read().decode()}")
            except OSError as error:
                # A gateway that ends lets go of connections that it has not taken yet: clients try again.
                if not isinstance(getattr(error, "reason", error), ConnectionResetError):
                    self.wrong.append(repr(error))
            else:
                self.num_answers += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if answer != text:
                    self.wrong.append(answer)

    def more(self, count=8):
        """Wait for so many more answers."""
        target = self.num_answers + count
        self._host.wait_until(lambda: self.num_answers >= target or self.wrong, "clients are answered", 30)


def test_every_role_is_restarted_under_load(host):
    mesh = host.up("--model", "echo", "--gateways", "2")
    before = host.ps()
    with Load(host) as load:
        load.more()
        renewed = host.meshctl("restart", *ROLES)
        assert renewed.returncode == 0, renewed.stderr
        load.more()
    assert load.wrong == []
    after = host.ps()
    for actor_id in before.keys() - {"supervisor"}:
        assert (after[actor_id]["epoch"], after[actor_id]["num_restarts"]) == (before[actor_id]["epoch"] + 1, 0)
    host.ends_well(mesh)


def test_a_drained_group_stays_away_and_the_other_one_serves(host):
    host.up("--model", "echo?step_ms=5")
    group = ["scheduler-decode-0", "worker-decode-0"]
    with Load(host) as load:
        # What the worker alone had in hand is not kept for it: it is said to stay away.
        for drained in (group[1:], group):
            load.more()
            ended = host.meshctl("drain", *drained)
            assert ended.returncode == 0, ended.stderr
            assert [host.ps()[actor_id]["state"] for actor_id in drained] == ["drained"] * len(drained)
            load.more()
            assert host.meshctl("restart", *drained).returncode == 0
            load.more()
    assert load.wrong == []
    assert load.slowest_s < 12, "of a worker that may only be renewed it would have been drained_wait_s"
    unknown = host.meshctl("drain", "nobody")
    assert unknown.returncode == 1
    assert "there is no actor or role nobody" in unknown.stderr
    stopped = host.meshctl("down")
    assert stopped.returncode == 0, stopped.stderr
    host.assert_nothing_left()
