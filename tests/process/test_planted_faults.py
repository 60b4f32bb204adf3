"""Faults planted in a mesh of one host, each found by what docs/watching.md says in "What is wrong?"."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import pytest

from cli import main as command_line
from cli.exit_codes import ExitCode
from tests.process import what_is_wrong
from tests.process.conftest import Host, wait_until
from tests.process.test_first_hour import all_commands

pytestmark = pytest.mark.process

SLOW = "a slow one"
TEMPLATE = (
    "{% if '" + SLOW + "' in messages[0].content %}"
    "{% for i in range(1200) %}{% for j in range(1200) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
KV_PAGES = 64
SETTINGS = """
model = "echo?step_ms=2"
mixed = 2
context_length = 1000
chat_template = "{template}"
api_key_file = "{keys}"
[kv]
pages = {pages}
[roles.scheduler]
policy = "priority"
"""
MOST_TOKENS = 700
LONG_TEXT = "word " * 120_000
"""A third of a second of a tokenizer's time."""
FOUND_HERE = {"slow worker", "full pool", "starving client", "loaded tokenizer", "long chat template",
              "small shared memory", "revoked key of a client"}  # fmt: skip
FOUND_BETWEEN_HOSTS = {"cut link", "paused host", "clock apart", "revoked key of a host"}


class Mesh:
    """One for all tests here; what a test has begun is over when it ends."""

    def __init__(self, host):
        self.host = host
        self.key_file = host.base / "api_keys"
        self.keys = {}
        for name in ("batch", "chat", "gone"):
            made = host.meshctl("keys", "api", name, "--to", str(self.key_file), name=False)
            assert made.returncode == ExitCode.OK, made.stderr
            self.keys[name] = made.stdout.strip()
        template = host.base / "template.jinja"
        template.write_text(TEMPLATE)
        file = host.base / "mesh.toml"
        file.write_text(SETTINGS.format(template=template, keys=self.key_file, pages=KV_PAGES))
        host.up("-f", str(file))

    @contextlib.contextmanager
    def asked(self, key, bodies, path="/v1/chat/completions", *, then=()):
        """Requests that run meanwhile, one for each body, `then` those of another key; who is left then hangs up."""
        connections = []
        try:
            for key, body in [*((key, body) for body in bodies), *then]:
                connection = http.client.HTTPConnection("127.0.0.1", self.host.port, timeout=60)
                connections.append(connection)
                headers = {"content-type": "application/json", "authorization": f"Bearer {self.keys[key]}"}
                connection.request("POST", path, json.dumps({"model": "echo", **body}), headers)
            yield connections
        finally:
            for connection in connections:
                connection.close()
            wait_until(self.is_idle, "the mesh has nothing to do")

    def is_idle(self):
        return not any(one["num_running"] or one["num_waiting"] for one in self.host.ps().values())


def chats(number, text="tell me more of that", **fields):
    return [{"messages": [{"role": "user", "content": f"{one} {text}"}], **fields} for one in range(number)]


def answers(connections):
    """Statuses, once all have answered."""
    found = []
    for connection in connections:
        response = connection.getresponse()
        response.read()
        found.append(response.status)
    return found


@pytest.fixture(scope="module")
def mesh():
    host = Host(tempfile.mkdtemp(prefix="km"))
    try:
        yield Mesh(host)
    finally:
        host.clean()
        shutil.rmtree(host.base)


def test_the_table_names_each_fault_with_two_commands_at_most_and_what_to_do():
    rows = what_is_wrong.rows()
    assert {*rows} == FOUND_HERE | FOUND_BETWEEN_HOSTS
    known = all_commands(command_line.typer.main.get_command(command_line.app))
    for row in rows.values():
        assert 1 <= len(row.commands) <= what_is_wrong.MOST_COMMANDS, row.fault
        assert all(command[0] in known for command in row.commands), row.fault
        assert row.prints, row.fault
        assert row.do, row.fault


def test_a_full_pool(mesh):
    # Each may take most of a pool, so two run and none of the others can enter. Two take 3 s: on a busy machine each
    # command takes as long, and of eight requests none was left when the fault was looked for.
    with mesh.asked("batch", chats(40, "x" * 200, max_tokens=MOST_TOKENS, ignore_eos=True)):
        wait_until(lambda: any(one["lacks_pages"] for one in mesh.host.ps().values()), "pages are lacking")
        # What is noted of a request is shown once it is the first to enter; the oldest is, before long.
        wait_until(lambda: "waits for pages" in mesh.host.meshctl("trace", "--slowest", "1").stdout, "it is noted")
        told = what_is_wrong.ask(mesh.host, "full pool")
    assert re.search(r"scheduler-mixed-[01]: requests wait for KV pages", told)


def test_a_starving_client(mesh):
    greedy = chats(20, "y" * 200, max_tokens=MOST_TOKENS, ignore_eos=True, priority=-1)
    with mesh.asked("batch", greedy, then=[("chat", body) for body in chats(1, max_tokens=5)]):
        told = what_is_wrong.ask(mesh.host, "starving client", one_starves).partition("CLIENTS\n")[2].splitlines()
    rows = {cells[0]: cells for cells in (line.split() for line in told[1:3])}
    assert rows["chat"][-1] == "0", "it got nothing"
    assert int(rows["batch"][-1].replace(",", "")) > 0, "the other has all"


def one_starves(told):
    """Its one request has waited for a second or more, without a token. After ten its priority rises."""
    clients = [line.split() for line in told.partition("CLIENTS\n")[2].splitlines()]
    return any(cells[:3] == ["chat", "1", "1"] and int(cells[3]) >= 1 for cells in clients if len(cells) > 3)


def test_a_long_chat_template(mesh):
    with mesh.asked("chat", chats(1, SLOW, max_tokens=3)) as asked:
        assert answers(asked) == [200]
        told = what_is_wrong.ask(mesh.host, "long chat template")
    assert longest_span(told) == "template"


def test_a_revoked_key(mesh):
    def status():
        with mesh.asked("gone", chats(1, max_tokens=3)) as asked:
            return answers(asked)[0]

    assert status() == 200
    lines = mesh.key_file.read_text().splitlines(keepends=True)
    mesh.key_file.write_text("".join(line for line in lines if not line.startswith("gone ")))
    wait_until(lambda: status() == 401, "the key is refused")
    told = what_is_wrong.ask(mesh.host, "revoked key of a client")
    assert mesh.keys["gone"] not in told


@pytest.mark.slow
def test_a_loaded_tokenizer(mesh):
    # Cut to what fits after it was encoded, and so many that the last would wait for four seconds.
    bodies = [{"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 1} for _ in range(12)]
    with mesh.asked("batch", bodies, "/v1/completions") as asked:
        assert answers(asked[:6]) == [200] * 6
        told = what_is_wrong.ask(mesh.host, "loaded tokenizer")
    assert longest_span(told) == "tokenize"
    cpu = {cells[0]: int(cells[4].rstrip("%")) for line in told.splitlines() if "%" in line
           if len(cells := line.split()) > 8 and cells[4].endswith("%")}  # fmt: skip
    assert max(cpu, key=cpu.get) == "tokenizer-0", cpu


@pytest.mark.slow
def test_a_slow_worker(mesh):
    with starved(mesh.host.ps()["worker-mixed-1"]["pid"]):
        with mesh.asked("chat", chats(12, max_tokens=20, ignore_eos=True)) as asked:
            assert answers(asked) == [200] * 12
        told = what_is_wrong.ask(mesh.host, "slow worker")
    step_ms = {found[1]: float(found[2]) for found in re.finditer(r"(scheduler-mixed-\d) .*? ([\d.]+) ms", told)}
    assert step_ms["scheduler-mixed-1"] > 4 * step_ms["scheduler-mixed-0"], step_ms


@contextlib.contextmanager
def starved(pid):
    """Meanwhile the process runs for 3 of 50 ms, as in a container that is throttled: too often to be called hung."""
    is_over = threading.Event()

    def throttle():
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.047)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.003)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def longest_span(told):
    """Of the timeline that `meshctl trace` drew."""
    took = {found[1]: float(found[2]) * (1 if found[3] == "s" else 1e-3)
            for found in re.finditer(r"^    (\S.*?) +([\d.]+) (m?s)  \|", told, re.MULTILINE)}  # fmt: skip
    return max(took, key=took.get)


def has_mount_namespaces():
    return not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode


@pytest.mark.skipif(not shutil.which("unshare") or not has_mount_namespaces(), reason="needs root, to mount a tmpfs")
def test_a_small_shared_memory(host):
    class Small:
        """A machine whose shared memory is what a container has by default."""

        @staticmethod
        def meshctl(*arguments):
            small = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]
            script = f'{" ".join(small)} && exec "$0" "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, *host.command(*arguments, name=False)]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)

    environment = {**host.environment, "KVMESH_KV__MEMORY": "256MiB"}
    told = what_is_wrong.ask(Small, "small shared memory")
    assert "64.0 MiB" in told
