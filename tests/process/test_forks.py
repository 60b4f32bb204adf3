"""Workers forked from the zygote: they compute, die, and come back, and so does the zygote."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_workers_and_zygote_come_back(host):
    mesh = host.up("--model", "random:tiny-qwen2", "--served-name", "echo", "--mixed", "1")
    supervisor = host.ps()["supervisor"]["pid"]
    answer = host.say("Say something.", max_tokens=8, temperature=0)
    worker = host.ps()["worker-mixed-0"]
    # The helper between zygote and worker is gone, so the worker is the supervisor's own child.
    assert f"PPid:\t{supervisor}\n" in Path(f"/proc/{worker['pid']}/status").read_text()
    assert Path(f"/proc/{worker['pid']}/comm").read_text().strip() == "worker-mixed-0"[:15]

    def next_worker(before):
        def look():
            entry = host.ps()["worker-mixed-0"]
            return entry if entry["epoch"] > before["epoch"] and entry["state"] == "ready" else None

        return host.wait_until(look, "the next worker is ready", 60.0)

    os.kill(worker["pid"], signal.SIGKILL)
    second = next_worker(worker)
    # Forks have the zygote's command line, so its log is what tells it apart, and its spare.
    zygotes = [pid for pid in host.processes() if os.readlink(f"/proc/{pid}/fd/1").endswith("zygote.log")]
    assert len(zygotes) == 2
    for zygote in zygotes:
        os.kill(zygote, signal.SIGKILL)
    assert host.say("Say something.", max_tokens=8, temperature=0) == answer
    os.kill(second["pid"], signal.SIGKILL)
    next_worker(second)
    assert host.say("Say something.", max_tokens=8, temperature=0) == answer
    host.ends_well(mesh)


def test_without_forks_every_actor_has_an_interpreter_of_its_own(host):
    mesh = host.up("--model", "echo", "--mixed", "1", KVMESH_SUPERVISION__FORK="false")
    worker = host.ps()["worker-mixed-0"]
    for actor_id, entry in host.ps().items():
        if actor_id != "supervisor":
            assert f"\0{actor_id}\0" in Path(f"/proc/{entry['pid']}/cmdline").read_text()
    os.kill(worker["pid"], signal.SIGKILL)
    host.wait_until(lambda: host.ps()["worker-mixed-0"]["epoch"] > worker["epoch"], "another worker is started", 30.0)
    host.wait_ready()
    assert host.say("one by one") == "one by one"
    host.ends_well(mesh)
