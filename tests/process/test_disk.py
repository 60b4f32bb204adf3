"""Pages on disk, by processes: what one mesh has stored is there for the next, and outlives the agent's death."""

import os
import re
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

TEXT = "what is said here fills some pages of sixteen tokens each, and then some more of them. "


def figure(host, name):
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", host.metrics(), re.MULTILINE)
    return float(found[1]) if found else -1.0


def test_what_was_stored_is_there_after_a_death_and_a_restart(host):
    disk = host.base / "disk"
    disk.mkdir(0o700)
    options = ("--model", "echo", "--mixed", "1", "--kv-disk", str(disk), "--kv-disk-size", "4MiB")
    mesh = host.up(*options)
    assert figure(host, "mesh_kv_disk_pages") == 0
    host.say(TEXT)
    # As many as are full: how many that are is the model's affair.
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= 4, "the first text is stored")
    before = figure(host, "mesh_kv_disk_pages")
    agent = host.pids()["kv-agent-0"]
    os.kill(agent, signal.SIGKILL)
    host.wait_until(lambda: host.pids()["kv-agent-0"] != agent, "another agent")

    def stores_again():
        host.say(f"{os.urandom(4).hex()} {TEXT}")
        return figure(host, "mesh_kv_disk_pages") > before

    # It opens the store when it is told of pages, and those are dropped that come before it is open.
    host.wait_until(stores_again, "the next agent stores, too")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_queued_pages") == 0, "nothing waits")
    before = figure(host, "mesh_kv_disk_pages")
    host.ends_well(mesh)
    mesh = host.up(*options)
    # Which pages there are is read after the store is open, while the mesh serves.
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= before, "the pages are found")
    host.ends_well(mesh)
