"""Faults planted between the hosts of a mesh, each found by what docs/watching.md says in "What is wrong?"."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

from cli.exit_codes import ExitCode
from tests.process import namespaces, what_is_wrong
from tests.process.conftest import Host, wait_until
from tests.process.namespaces import Net, NetHost
from tests.process.topologies import SERVING, write_topology

pytestmark = [pytest.mark.process, pytest.mark.slow]

AHEAD_S = 90
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += AHEAD_S;
    return result;
}
"""
"""What a process under it takes for the time of day is ahead; its monotonic clock is the machine's."""


@contextlib.contextmanager
def hosts_of(*makers):
    """Hosts of one mesh, and then nothing of them."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for make in makers:
            base = tempfile.mkdtemp(prefix="km")
            stack.callback(shutil.rmtree, base)
            hosts.append(make(base))
            stack.callback(hosts[-1].clean)
            hosts[-1].name = hosts[0].name
        yield hosts


@pytest.fixture(scope="module")
def two_hosts():
    """`head` serves, `d` decodes, with keys; the clock of `d` is ahead."""
    with hosts_of(Host, Host) as (head, d):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            pytest.skip("needs a C compiler, for a clock that is ahead")
        source, library = d.base / "clock.c", d.base / "clock.so"
        source.write_text(CLOCK.replace("AHEAD_S", str(AHEAD_S)))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        file = head.base / "mesh.toml"
        write_topology(file, head.port, {"head": SERVING | {"mixed": 1}, "d": {"decode": 1}}, model="echo")
        keys = {name: one.meshctl("keys", "new", "-f", str(file), "--host", name).stdout.strip()
                for name, one in (("head", head), ("d", d))}  # fmt: skip
        for one, arguments in ((head, ("d", keys["d"])), (d, ("head", keys["head"], "--roles", "registry"))):
            assert one.meshctl("keys", "add", "-f", str(file), *arguments).returncode == ExitCode.OK
        d.up("-f", str(file), "--host", "d", wait=False, LD_PRELOAD=str(library))
        head.up("-f", str(file), "--host", "head")
        wait_until(lambda: head.ps().get("scheduler-decode-0.d", {}).get("state") == "ready", "d is ready")
        yield head, d


def test_a_clock_apart(two_hosts):
    head, d = two_hosts
    told = what_is_wrong.ask(head, "clock apart")
    (apart_s,) = re.findall(r"clock of host d is (\d+) s ahead", told)
    assert abs(int(apart_s) - AHEAD_S) <= 1
    assert f"host head is {AHEAD_S} s behind this one's" in d.meshctl("ps").stdout


def test_a_paused_host(two_hosts):
    head, d = two_hosts
    paused = d.processes()
    assert len(paused) >= 4
    try:
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        told = what_is_wrong.ask(head, "paused host")
        assert re.search(r"worker-decode-0\.d +d +worker +unknown", told)
        assert head.say("still there?") == "still there?"
    finally:
        for pid in paused:
            # The supervisor kills what it finds hung when it wakes.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    wait_until(lambda: head.ps().get("scheduler-decode-0.d", {}).get("state") == "ready", "d is back")


def test_a_revoked_key_of_a_host(two_hosts):
    head, d = two_hosts
    assert head.meshctl("keys", "revoke", "d").returncode == ExitCode.OK
    wait_until(lambda: "meshctl keys add d" in d.meshctl("ps").stdout, "d knows why")
    what_is_wrong.ask(d, "revoked key of a host")


@pytest.mark.timeout(240)
@pytest.mark.skipif(not namespaces.POSSIBLE, reason=namespaces.REASON)
def test_a_cut_link():
    net = Net(3)
    try:
        with hosts_of(*(lambda base, index=index: NetHost(base, net, index) for index in range(3))) as (head, p, d):
            file = head.base / "mesh.toml"
            topology = [
                "port = 8000",
                'model = "echo"',
                "insecure = true",
                "local_prefill_max = 0",
                "[kv]\npages = 200",
            ]
            for index, (name, roles) in enumerate({"head": SERVING, "p": {"prefill": 1}, "d": {"decode": 1}}.items()):
                topology += [f"[hosts.{name}]", f'address = "{net.address(index)}"']
                topology += [f"{role} = {number}" for role, number in roles.items()]
            file.write_text("\n".join(topology))
            for host, name in ((p, "p"), (d, "d"), (head, "head")):
                host.port = 8000
                host.up("-f", str(file), "--host", name, wait=False)

            def serves():
                ended = [
                    host.started[-1].log.read_text() for host in (p, d, head) if host.started[-1].poll() is not None
                ]
                assert not ended, ended
                return head.meshctl("probe", "ready").returncode == ExitCode.OK

            # Three hosts on two cores, beside the two of the other tests: 15 s, and once, with 20 other processes that
            # wanted to run, more than a minute.
            wait_until(serves, "it serves", 100)

            def ask():
                # A new prompt each time: of one that `d` has seen nothing is pulled.
                text = f"{time.time()} and what comes of it"
                assert head.ask(text).strip() == text

            def is_pulled():
                ask()
                return "by tcp" in head.meshctl("ps").stdout

            wait_until(is_pulled, "p prefills for d")

            def is_noticed():
                ask()
                return "cannot reach" in head.meshctl("ps").stdout

            with net.cut(1, 2):
                wait_until(is_noticed, "the link is missed")
                told = what_is_wrong.ask(head, "cut link")
                assert "scheduler-decode-0.d: cannot reach scheduler-prefill-0.p" in told
                assert not re.search(r"cannot reach \S+\.head", told)

            def is_healed():
                ask()
                return "cannot reach" not in head.meshctl("ps").stdout

            wait_until(is_healed, "it is found again", 90)
    finally:
        net.close()
