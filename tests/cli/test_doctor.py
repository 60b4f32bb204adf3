"""What `meshctl doctor` says of a machine: each verdict from facts, without its condition; the facts of this one."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import main as command_line
from cli.commands import doctor as command
from cli.doctor import machine
from cli.doctor.checks import (
    Clock,
    Facts,
    Fault,
    Finding,
    Kernels,
    Library,
    Path,
    Port,
    ProcessLimits,
    SharedMemory,
    check,
)
from cli.doctor.versions import release, satisfies
from cli.exit_codes import ExitCode
from cli.plan.limits import LEAST, Need, shortfalls
from cli.plan.sources import load_settings
from mesh.runtime.process_limits import (
    ADDRESS_SPACE,
    CPU_TIME,
    DATA,
    FILE_SIZE,
    FILES,
    LOCKED,
    PROCESSES,
    STACK,
    TASKS,
    Limit,
    Limits,
)

GIB = 1 << 30
NOW = 1_800_000_000.0


def limits(values: dict[Limit, int] | None = None, needed: Sequence[Need] = LEAST, *, on_device: bool = False) -> Any:
    """What a process may have, by limit; all else without end."""
    found = Limits(values or {}, {limit: 0 for limit in (PROCESSES, TASKS) if limit in (values or {})})
    return ProcessLimits(found, shortfalls(needed, found), on_device)


WELL = Facts(
    uid=1000,
    is_running=False,
    fault=None,
    memory=SharedMemory("/dev/shm", 4 * GIB, 8 * GIB, True, GIB),
    limits=limits({FILES: 65_536, LOCKED: 8192}),
    kernels=Kernels("x86_64", True, {"avx512": "", "avx2": ""}),
    clock=Clock(NOW, 0.0001, "tsc", int(NOW) - 5),
    ports=[Port("gateway", "127.0.0.1:8000")],
    paths=[Path("run directory", "/run/user/1000/kvmesh/default", 1000, 0o700)],
    socket_bytes=(70, 99),
    libraries=[Library("pyzmq", ">=26.2", "27.1.0"), Library("cupy-cuda12x", ">=14,<15", "", "cuda12")],
)


def test_a_machine_that_is_well_has_one_line_for_each_check() -> None:
    findings = check(WELL)
    assert {finding.state for finding in findings} == {"ok"}
    assert [finding.check for finding in findings] == [
        *("configuration", "shared memory", "limits", "kernels", "clock", "port of the gateway", "rights"),
        "versions",
    ]
    assert not any(finding.do for finding in findings)
    assert findings[1].found == "/dev/shm has 4.0 GiB free of 8.0 GiB; the pools take 1.0 GiB"


MISSING = "_avx512.so was not built; run make setup"
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # What is otherwise: fields of the facts; the check and its state, words of what is found, words of what to do.
    "the configuration is wrong": (
        {"fault": Fault("port is 'x': it must be a whole number", "correct it")},
        "configuration fail", "port is 'x'", "correct it",
    ),
    "the model is not here yet": (
        {"fault": Fault("the model o/m is not here: not fetched", "meshctl up fetches it", is_certain=False)},
        "configuration warn", "not fetched", "fetches it",
    ),
    "the pools do not fit": (
        {"fault": Fault("/dev/shm is too small for KV pools: 64.0 MiB are free", "--shm-size=900m", is_memory=True)},
        "shared memory fail", "too small", "--shm-size",
    ),
    "they fill what there is": (
        {"memory": SharedMemory("/dev/shm", GIB, GIB, True, GIB - 1)},
        "shared memory warn", "leaves little", "--shm-size",
    ),
    "they are on a disk": (
        {"memory": SharedMemory("/var/kv", GIB, GIB, False, 1)}, "shared memory warn", "on a disk", "tmpfs",
    ),
    "few files": ({"limits": limits({FILES: 4096})}, "open files warn", "4,096 at most", "nofile=N"),
    "hardly any files": (
        {"limits": limits({FILES: 83})}, "open files fail", "`ulimit -n` is 83, and 84 are needed", "LimitNOFILE",
    ),
    "few processes": (
        {"limits": limits({PROCESSES: 7})}, "processes and threads of this user fail", "8 are needed", "nproc=N",
    ),
    "few tasks": (
        {"limits": limits({TASKS: 7})}, "processes and threads of this control group fail", "8 are", "--pids-limit",
    ),
    "little address space": (
        {"limits": limits({ADDRESS_SPACE: 1 << 20})}, "address space fail", "1,024 KiB, and 393,216 KiB", "LimitAS",
    ),
    "limited address space": ({"limits": limits({ADDRESS_SPACE: GIB})}, "address space warn", "1.0 GiB", "LimitAS"),
    "little data": ({"limits": limits({DATA: 1 << 20})}, "data segment fail", "131,072 KiB are needed", "LimitDATA"),
    "a small stack": ({"limits": limits({STACK: 1 << 17})}, "stack fail", "128 KiB, and 256 KiB", "ulimit -s 8192"),
    "small files": ({"limits": limits({FILE_SIZE: 0})}, "size of a file fail", "is 0 KiB", "LimitFSIZE"),
    "an end of CPU time": ({"limits": limits({CPU_TIME: 60})}, "seconds of CPU time warn", "60 at most", "LimitCPU"),
    "memory cannot be locked": (
        {"limits": limits({LOCKED: 65_536}, on_device=True)}, "locked memory warn", "64.0 KiB at most", "memlock=-1",
    ),
    "another architecture": (
        {"kernels": Kernels("aarch64", False, {})}, "kernels warn", "no native kernels for aarch64", "",
    ),
    "an old CPU": ({"kernels": Kernels("x86_64", True, {})}, "kernels warn", "no AVX2", ""),
    "the best kernels were not built": (
        {"kernels": Kernels("x86_64", True, {"avx512": MISSING, "avx2": ""})},
        "kernels warn", "_avx512.so was not built: avx2 is used, though this CPU can run avx512", "make setup",
    ),
    "no kernels were built": (
        {"kernels": Kernels("x86_64", True, {"avx2": "no compiler; install g++, then make setup"})},
        "kernels warn", "no compiler: torch computes", "install g++",
    ),
    "the clock was never set": ({"clock": Clock(0.0, 0.0, "", 0)}, "clock fail", "never set", "NTP"),
    "the clock was ahead": (
        {"clock": Clock(NOW, 0.0, "", int(NOW) + 86_400)}, "clock warn", "86,400 s ahead", "NTP",
    ),
    "the clock is being set": ({"clock": Clock(NOW, -3.0, "", 0)}, "clock warn", "-3.000 s", "what sets it"),
    "the clock is slow to read": ({"clock": Clock(NOW, 0.0, "hpet", 0)}, "clock warn", "hpet", "dmesg"),
    "the port is taken": (
        {"ports": [Port("gateway", "127.0.0.1:8000", "Address already in use", "another --port", "nginx, process 7")]},
        "port of the gateway fail", "127.0.0.1:8000: Address already in use, held by nginx, process 7", "--port",
    ),
    "a key is open to others": (
        {"paths": [Path("key file", "/k/host.json", 1000, 0o644)]},
        "rights fail", "/k/host.json is open to other users (0644)", "chmod go-rwx /k/host.json",
    ),
    "the run directory is another's": (
        {"paths": [Path("run directory", "/tmp/kvmesh-1000", 0, 0o700)]},
        "rights fail", "belongs to user 0, not to this one (1000)", "owner",
    ),
    "a file may be changed by others": (
        {"paths": [Path("topology", "/t", 1000, 0o666, is_secret=False)]}, "rights warn", "(0666)", "chmod go-w /t",
    ),
    "the run directory is too long": (
        {"socket_bytes": (120, 99)}, "rights fail", "120 bytes, and the kernel takes 99", "XDG_RUNTIME_DIR",
    ),
    "a library is missing": (
        {"libraries": [Library("uvloop", ">=0.21", "")]}, "versions fail", "uvloop is not installed", "uvloop>=0.21",
    ),
    "a library is too old": (
        {"libraries": [Library("llguidance", ">=1.9,<1.10", "1.10.1")]},
        "versions fail", "llguidance 1.10.1 is installed; >=1.9,<1.10 is asked for",
        "pip install 'llguidance>=1.9,<1.10'",
    ),
    "an extra's library is too new": (
        {"libraries": [Library("cupy-cuda12x", ">=14,<15", "15.0", "cuda12")]},
        "versions warn", "by the extra cuda12", "cupy",
    ),
    "it is not installed": ({"libraries": []}, "versions warn", "not installed", "pip install"),
}  # fmt: skip


@pytest.mark.parametrize(("otherwise", "verdict", "found", "do"), CASES.values(), ids=CASES.keys())
def test_each_trouble_is_said_with_what_to_do(otherwise: dict[str, Any], verdict: str, found: str, do: str) -> None:
    findings = check(WELL._replace(**otherwise))
    (trouble,) = [finding for finding in findings if finding.state != "ok"]
    assert f"{trouble.check} {trouble.state}" == verdict
    assert found in trouble.found
    assert do in trouble.do
    assert bool(do) == bool(trouble.do)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"memory": None},
        {"memory": SharedMemory("/dev/shm", 1, GIB, True, None)},
        {"is_running": True, "memory": SharedMemory("/dev/shm", 1, GIB, True, None)},
        {"limits": limits({LOCKED: 0})},
        {"limits": limits({LOCKED: 2 * GIB}, on_device=True)},
        {"limits": limits({})},
        {"ports": [Port("gateway", "127.0.0.1:8000", "taken", "", "gateway-0, process 7", is_own=True)]},
        {"ports": [], "paths": []},
        {"kernels": Kernels("x86_64", True, {"avx2": ""})},
        {"clock": Clock(NOW, 0.0, "", int(NOW) + 10)},
    ],
)
def test_what_is_no_trouble(otherwise: dict[str, Any]) -> None:
    assert {finding.state for finding in check(WELL._replace(**otherwise))} == {"ok"}


def test_versions_are_compared_by_their_numbers() -> None:
    assert (release("2.9.0+cu128"), release("1.0rc1"), release("24")) == ((2, 9, 0), (1, 0), (24,))
    for version, wanted, is_in in (
        ("2.10.0", ">=2.9", True),
        ("2.9", ">=2.9.0", True),
        ("0.55.0", "<0.55,>=0.34", False),
        ("0.54.9", "<0.55,>=0.34", True),
        ("3.14.0", "<3.14,>=3.11", False),
        ("1.9.5", "!=1.9.5", False),
        ("1.9.5", "==1.9.5", True),
        ("1.9.5", ">1.9.5", False),
        ("1.9.5", "<=1.9.4", False),
        ("1.9.5", "", True),
    ):
        assert satisfies(version, wanted) is is_in, (version, wanted)


def test_this_machine_is_looked_at(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    keys = tmp_path / "config" / "kvmesh" / "blue"
    keys.mkdir(parents=True)
    (keys / "host.json").touch(0o644)
    (tmp_path / "keys").touch(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = {"name": "blue", "port": port, "model": "echo", "api_key_file": str(tmp_path / "keys")}
        facts = machine.look(load_settings(None, {}, options), os.environ)
        (taken,) = facts.ports
    assert taken.error == "Address already in use"
    assert taken.holder.endswith(f"process {os.getpid()}")
    assert not taken.is_own
    assert {(path.what, path.mode) for path in facts.paths} == {("key file", 0o644), ("file of API keys", 0o600)}
    assert {library.name for library in facts.libraries} >= {"python", "pyzmq", "torch", "cupy-cuda12x"}
    assert "pytest" not in {library.name for library in facts.libraries}
    assert abs(facts.clock.drift_s) < 5.0
    assert facts.socket_bytes[1] < 108
    by_check = {finding.check: finding for finding in check(facts)}
    assert by_check["port of the gateway"].state == by_check["rights"].state == "fail"


def test_it_fails_if_one_finding_does_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("clock", "ok", "fine"), Finding("rights", "fail", "open", "chmod it")]
    monkeypatch.setattr(command, "look", lambda *_: None)
    monkeypatch.setattr(command, "check", lambda _: findings)
    run = CliRunner().invoke(command_line.app, ["doctor"])
    assert run.exit_code == ExitCode.FAILED
    assert run.stdout.splitlines() == [
        "ok    clock   fine",
        "fail  rights  open",
        "              do: chmod it",
    ]
    run = CliRunner().invoke(command_line.app, ["doctor", "-o", "json"])
    assert run.exit_code == ExitCode.FAILED
    assert json.loads(run.stdout)[1] == {"check": "rights", "state": "fail", "found": "open", "do": "chmod it"}
    findings[1] = Finding("rights", "warn", "open", "chmod it")
    assert CliRunner().invoke(command_line.app, ["doctor"]).exit_code == ExitCode.OK
