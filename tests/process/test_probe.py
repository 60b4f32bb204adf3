"""`meshctl probe` asks one mesh what a container's health check asks: one line, an exit code, in bounded time."""

import os
import signal
import time

import pytest

from cli.exit_codes import ExitCode

pytestmark = pytest.mark.process


def test_a_health_check_says_what_is_and_why_not(host):
    def probe(question, *more):
        done = host.meshctl("probe", question, *more)
        assert len((done.stdout + done.stderr).splitlines()) == 1, "one line"
        return done.returncode, done.stdout or done.stderr

    for question in ("live", "ready", "generate"):
        code, line = probe(question)
        assert (code, line[:9]) == (ExitCode.NOT_RUNNING, "not live:")
    host.up("--model", "echo", "--mixed", "1")
    for question in ("live", "ready", "generate"):
        code, line = probe(question)
        assert (code, line.split(":")[0]) == (0, question), line

    assert host.meshctl("drain", "worker-mixed-0").returncode == 0
    assert probe("ready")[0] == 0, "that it is away is an operator's wish"
    code, line = probe("generate")
    assert code == ExitCode.NOT_READY, line
    assert "no worker is ready" in line, "in the gateway's words"
    assert host.meshctl("restart", "worker-mixed-0").returncode == 0
    host.wait_until(lambda: probe("generate")[0] == 0, "a token comes again")

    supervisor = host.ps()["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        began = time.monotonic()
        code, line = probe("ready", "--timeout", "0.5")
        assert (code, line[:9]) == (ExitCode.NOT_RUNNING, "not live:")
        assert "does not answer" in line
        # Most of that is Python and its imports, on a machine that does much else.
        assert time.monotonic() - began < 20.0
    finally:
        os.kill(supervisor, signal.SIGCONT)
