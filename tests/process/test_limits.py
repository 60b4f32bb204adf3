"""Meshes under limits of the system: each is named by the error, or the mesh serves. No start outlasts its time."""

import asyncio
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.client import ASK_TIMEOUT_S, connected, find_mesh
from cli.commands.up import plan
from cli.errors import CliError
from cli.plan.limits import LEAST
from cli.plan.sources import load_settings
from cli.protocol import ActorList, ListActors
from cli.supervisor.told.progress import Progress
from mesh.runtime import process_limits
from nodes import Engine
from nodes.engine.errors import StartFailed
from tests.process.conftest import wait_until

pytestmark = pytest.mark.process

ECHO = ("--model", "echo", "--mixed", "1")
START_S = 40.0
"""`start_timeout_s` of these meshes: a start takes 2 s, and ten times as long beside others."""
MARGIN_S = 60.0
"""For what comes before and after: imports, the plan, the end of all processes; 26 s on two cores that eight share."""
USER = 200_000 + os.getpid()
"""Has no other processes: those of a user count together."""
PIDS = Path("/sys/fs/cgroup/pids") if Path("/sys/fs/cgroup/pids").exists() else Path("/sys/fs/cgroup")


def needed():
    """What an echo mesh needs, by limit."""
    settings = load_settings(None, {}, {"model": "echo", "mixed": 1})
    return {
        need.limit: need.amount for need in plan(settings, Progress(None), fetches=False, checks_limits=False).needs
    }


def limited(limit):
    """A way to set a limit of the process that is about to run."""
    return lambda value, _: lambda: resource.setrlimit(limit, (value, value))


def group(value, stack):
    """A control group with so many processes and threads, for the process that is about to run."""
    at = PIDS / f"kvmesh-test-{os.getpid()}"
    try:
        at.mkdir()
        stack.callback(leave, at)
        (at / "pids.max").write_text(str(value))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    return lambda: (at / "cgroup.procs").write_text("0")


def leave(at):
    wait_until(lambda: not (at / "cgroup.procs").read_text(), "the group is empty")
    at.rmdir()


def another_user(value, _stack):
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv: processes of this user run beside these")
    return lambda: resource.setrlimit(resource.RLIMIT_NPROC, (value, value))


AS_USER = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
    # To read what root alone may; of these none exempts from the limit.
    "--inh-caps=+dac_override,+dac_read_search", "--ambient-caps=+dac_override,+dac_read_search",
)  # fmt: skip

MIB = 1 << 20
BESIDE = {process_limits.PROCESSES: 3, process_limits.TASKS: 3}
"""What there is besides: `meshctl` itself, twice with `-d`, and the child that looks at the model."""
ENOUGH, JUST_TOO_LOW = "enough", "just too low"
CASES = [
    ("open files", process_limits.FILES, limited(resource.RLIMIT_NOFILE), (8, JUST_TOO_LOW, ENOUGH)),
    ("processes of a user", process_limits.PROCESSES, another_user, (3, JUST_TOO_LOW, ENOUGH)),
    ("tasks of a group", process_limits.TASKS, group, (3, JUST_TOO_LOW, ENOUGH)),
    ("address space", process_limits.ADDRESS_SPACE, limited(resource.RLIMIT_AS), (300 * MIB, JUST_TOO_LOW, ENOUGH)),
    ("data segment", process_limits.DATA, limited(resource.RLIMIT_DATA), (100 * MIB, JUST_TOO_LOW, ENOUGH)),
    ("stack", process_limits.STACK, limited(resource.RLIMIT_STACK), (192 << 10, JUST_TOO_LOW, ENOUGH)),
    ("size of a file", process_limits.FILE_SIZE, limited(resource.RLIMIT_FSIZE), (0, JUST_TOO_LOW, ENOUGH)),
    # Nothing on the CPU is locked.
    ("locked memory", process_limits.LOCKED, limited(resource.RLIMIT_MEMLOCK), (0, 4096, 65_536)),
]
IN_CI = {("open files", 8), ("address space", JUST_TOO_LOW), ("size of a file", 0)}
"""Of the others, one serves in the test of a gateway below."""


def cases():
    for name, limit, apply, values in CASES:
        for value in values:
            marks = () if (name, value) in IN_CI else (pytest.mark.slow,)
            yield pytest.param(limit, apply, value, id=f"{name}: {value}", marks=marks)


def up(host, apply, *options, prefix=(), **environment):
    """`up -d` in a process that `apply` limits, within the time that a start may take."""
    return subprocess.run(
        [*prefix, *host.command("up", "-d", "--port", str(host.port), *options)],
        capture_output=True,
        text=True,
        timeout=START_S + MARGIN_S,
        # Coverage writes files of its own, and takes memory.
        env={
            **{name: value for name, value in host.environment.items() if not name.startswith("COVERAGE_")},
            "KVMESH_SUPERVISION__START_TIMEOUT_S": f"{START_S:g}",
            **environment,
        },
        check=False,
        preexec_fn=apply,
    )


def stop(host, prefix=()):
    subprocess.run([*prefix, *host.command("down")], env=host.environment, timeout=60, capture_output=True, check=True)


@pytest.mark.parametrize(("limit", "apply", "value"), [*cases()])
def test_a_start_under_a_limit_names_it_or_serves(host, limit, apply, value):
    serves = value == ENOUGH or limit is process_limits.LOCKED
    if value in (ENOUGH, JUST_TOO_LOW):
        value = needed()[limit] - (value == JUST_TOO_LOW) + BESIDE.get(limit, 0) * (value == ENOUGH)
    prefix = AS_USER if apply is another_user else ()
    if prefix:
        os.chown(host.base, USER, USER)
    with ExitStack() as stack:
        ended = up(host, apply(value, stack), *ECHO, prefix=prefix)
        if serves:
            assert ended.returncode == 0, ended.stderr
            assert host.say("hello") == "hello"
            stop(host, prefix)
        else:
            assert ended.returncode == 11, ended.stderr
            assert limit.name in ended.stderr
            assert f"`{limit.shown_by}` is {limit.amount(value)}" in ended.stderr
            assert "needed" in ended.stderr
            assert limit.do in ended.stderr
            assert "Traceback" not in ended.stderr
        host.assert_nothing_left()


UNCHECKED = """
import cli.plan.limits
cli.plan.limits.require = lambda *_: None
"""
"""As if others had taken what was there when it was looked at."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "value"),
    [
        *((process_limits.FILES, value) for value in (12, 24, 40, 48, 56, 64)),
        *((process_limits.TASKS, value) for value in (6, 12, 20, 30)),
        *((process_limits.ADDRESS_SPACE, value * MIB) for value in (150, 250, 330)),
        *((process_limits.DATA, value * MIB) for value in (40, 60)),
        *((process_limits.CPU_TIME, value) for value in (1, 2)),
        *((process_limits.FILE_SIZE, value << 10) for value in (4, 64, 8192)),
    ],
)
def test_a_limit_that_is_met_in_the_middle_is_named_or_the_mesh_serves(host, limit, value):
    (host.base / "sitecustomize.py").write_text(UNCHECKED)
    with ExitStack() as stack:
        apply = group(value, stack) if limit is process_limits.TASKS else limited(limit.number)(value, stack)
        ended = up(host, apply, *ECHO, PYTHONPATH=str(host.base))
        if ended.returncode:
            assert ended.returncode in (1, 9, 11), ended.stderr
            assert limit.shown_by in ended.stderr, ended.stderr
        else:
            assert host.say("hello") == "hello"
            subprocess.run(host.command("down", "--force"), env=host.environment, timeout=60, capture_output=True)
    host.assert_nothing_left(within_s=30.0)


@pytest.mark.parametrize("options", [(), ("-d",)])
def test_a_start_that_is_not_over_in_its_time_is_ended(host, options):
    environment = {"KVMESH_SUPERVISION__START_TIMEOUT_S": "0.1"}
    ended = host.meshctl("up", *options, *ECHO, "--port", str(host.port), timeout_s=MARGIN_S, **environment)
    assert ended.returncode == 9, ended.stderr
    (why,) = re.findall(r"why: (not ready within start_timeout_s \(0\.1 s\).*)", ended.stderr)
    for who in ("registry", "gateway-0", "worker-mixed-0", "scheduler-mixed-0"):
        assert who in why
    assert "spawning, the zygote, which it is forked from, is not ready" in why
    host.assert_nothing_left()


def test_an_engine_s_start_is_ended_too(host, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.base))
    with pytest.raises(StartFailed, match=r"not ready within start_timeout_s \(0\.1 s\): .*registry"):
        Engine("echo", mixed=1, supervision={"start_timeout_s": 0.1})


def test_a_role_that_is_run_by_hand_does_not_wait_for_ever_for_a_registry(host):
    config = json.dumps({"model": "echo"})
    ended = host.meshctl("run", "detokenizer", "--start-timeout", "0.5", "--config", config)
    assert ended.returncode == 9, ended.stderr
    assert re.search(r"detokenizer#\d+ was not ready within 0\.5 s", ended.stderr)
    host.assert_nothing_left()


def test_a_mesh_that_has_all_the_clients_it_may_have_serves_those(host, monkeypatch):
    """Of a gateway's 199 descriptors some 80 are for clients, of the supervisor's 60 for six peers beside its actors.

    Newcomers are told so, and taken again when others have left.
    """
    apply = limited(resource.RLIMIT_NOFILE)(needed()[process_limits.FILES], None)
    assert up(host, apply, *ECHO).returncode == 0
    before = host.pids()
    where = ("127.0.0.1", host.port)
    with ExitStack() as stack:
        served = http.client.HTTPConnection(*where, timeout=30)
        stack.callback(served.close)
        for _ in range(3):
            assert status(served) == 200
            for _ in range(100):
                stack.enter_context(socket.create_connection(where, timeout=30))
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{host.url}/health", timeout=30)
        assert json.loads(refused.value.read())["error"]["code"] == "too_many_connections"
        assert status(served) == 200
    wait_until(lambda: answers(host), "there is room again")
    assert host.say("hello") == "hello"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.base))
    answers_of_it = asyncio.run(peers_of(find_mesh(host.name), 40))
    assert 5 <= Counter(map(type, answers_of_it))[ActorList] < 40, "six at a time"
    assert all(isinstance(answer, ActorList | CliError) for answer in answers_of_it), answers_of_it
    assert host.pids() == before, "nobody died of it"
    log = (host.run_directory / "logs" / "gateway-0.log").read_text()
    assert log.count('"connections_refused"') == 1, log
    assert "`ulimit -n`" in log
    stop(host)
    host.assert_nothing_left()


async def peers_of(mesh, number):
    """What so many peers at once are told by a supervisor."""

    async def peer():
        async with connected(mesh) as ask:
            answer = await ask(ListActors(), ActorList)
            # Linked for as long as others try, which is one ask's time.
            await asyncio.sleep(ASK_TIMEOUT_S)
            return answer

    return await asyncio.gather(*(peer() for _ in range(number)), return_exceptions=True)


def status(connection):
    connection.request("GET", "/health")
    with connection.getresponse() as response:
        response.read()
        return response.status


def answers(host):
    try:
        return urllib.request.urlopen(f"{host.url}/health", timeout=30).status == 200
    except urllib.error.HTTPError:
        return False


def test_what_every_mesh_needs_is_less_than_the_smallest_one_needs():
    mesh = needed()
    assert all(mesh[limit] >= amount for limit, amount, _ in LEAST)
    assert signal.SIGXCPU.name in process_limits._WORDS
