"""What a newcomer types: every command of the README and of each command's `--help` example, on one mesh."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli import main as command_line
from cli.commands.run import _parser
from cli.exit_codes import ExitCode

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST, LAST = ("up",), ("drain", "down")
"""The others may be typed in any order."""

SAYS = {
    "up": "ready at http://",
    "ps": "TOKENS/S",
    "status": "gateway-0",
    "top": "DRAWN/S",
    "trace": "/v1/chat/completions",
    "logs": '"event":"joined"',
    "chat": "82",
    "bench": "8 of 8 requests whole",
    "probe": "ready: ",
    "doctor": "shared memory",
    "models": "random:qwen3-0.6b",
    "models show": "chat_template.jinja",
    "version": "meshctl ",
    "config show": "port = ",
    "config validate": "the configuration is fine",
    "config schema": "$defs",
    "keys new": "has its keys in",
    "keys add": "host d may join",
    "keys ls": "version 2",
    "keys revoke": "is revoked",
    "keys token": "no mesh",
    "keys api": "the key is shown only now",
    "chaos": "lost: 0; different: 0",
    "kv ls": "no host keeps KV pages on disk",
    "kv stats": "no host keeps KV pages on disk",
    "kv why": "full pages of 16 tokens",
    "kv flush": "nothing to forget",
    "memory": '"group": "prefill-0"',
    "release": "prefill-0  released",
    "resume": "prefill-0  held",
    "restart": "epoch 1",
    "drain": "drained",
    "down": "stopped in",
}
"""What each has to say, in stdout or stderr."""


def all_commands(group=None, before=()):
    """Words of every command there is."""
    group = typer.main.get_command(command_line.app) if group is None else group
    found = []
    for name, command in group.commands.items():
        words = (*before, name)
        found += all_commands(command, words) if hasattr(command, "commands") else []
        # `models` does something by itself, too.
        found += [" ".join(words)] if getattr(command, "invoke_without_command", True) else []
    return found


def example_of(command):
    """The example in a command's help, as words without `meshctl`."""
    if command == "run":
        text = _parser().format_help()
    else:
        result = CliRunner().invoke(command_line.app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        text = result.stdout
        assert "Usage: " in text
    (line,) = re.findall(r"Example: meshctl (.+?)\s*$", text, re.MULTILINE)
    return shlex.split(line)


def typed_lines():
    """What stands in the README's blocks of code, continued lines joined, comments gone."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.split(" ")[0] in ("make", "curl", "meshctl")]


def test_the_readme_names_commands_that_there_are_each_with_an_example():
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?`) \| ", table, re.MULTILINE)
    spans = [span.removeprefix("meshctl ").split() for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    commands = all_commands()
    assert len(spans) >= 12
    for words in spans:
        assert any(command.split()[0] == words[0] for command in commands), words
    for command in commands:
        assert example_of(command)[: len(command.split())] == command.split()
    assert {*SAYS, "run"} == set(commands), "say here what a new command says"
    for target in (words[1] for words in typed_lines() if words[0] == "make"):
        assert re.search(rf"^{target}: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.timeout(240)
def test_what_the_readme_and_the_help_of_every_command_say_works_as_it_is_typed(host):
    host.environment |= {
        "KVMESH_NAME": host.name,
        "KVMESH_PORT": str(host.port),
        # Enough for the README's question, whatever else uses the host's memory.
        "KVMESH_KV__MEMORY": "64MiB",
    }
    place = {command: (command in LAST, command not in FIRST, LAST.index(command) if command in LAST else 0)
             for command in all_commands()}  # fmt: skip
    for command in sorted(place, key=place.__getitem__):
        words = example_of(command)
        if command == "run":
            be_one_more(host, words)
            continue
        done = host.meshctl(*words, name=False)
        # A token is of a mesh of several hosts: `test_joining.py` takes one there.
        expected = ExitCode.NOT_RUNNING if command == "keys token" else ExitCode.OK
        assert done.returncode == expected, (words, done.stdout, done.stderr)
        assert SAYS[command] in done.stdout + done.stderr, words
        assert "Traceback" not in done.stderr
        if command == "up":
            ask_as_the_readme_does(host)
            assert_logs_of_a_healthy_start(host)
    host.assert_nothing_left()


def ask_as_the_readme_does(host):
    asked = [words for words in typed_lines() if words[0] == "curl"]
    assert asked
    for words in asked:
        typed = [word.replace("127.0.0.1:8000", f"127.0.0.1:{host.port}") for word in words]
        done = subprocess.run([*typed, "-sS"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "82"


def assert_logs_of_a_healthy_start(host):
    """In order of time, nothing said twice, nothing to worry about."""
    lines = [json.loads(line) for line in host.meshctl("logs", "-n", "1000", name=False).stdout.splitlines()]
    times = [line.pop("timestamp") for line in lines]
    assert times == sorted(times)
    assert {line["actor"] for line in lines} >= {"gateway-0", "worker-decode-0", "scheduler-prefill-0", "registry"}
    told = [json.dumps(line, sort_keys=True) for line in lines]
    assert sorted(set(told)) == sorted(told)
    assert host.meshctl("logs", "--level", "warning", name=False).stdout == ""


def be_one_more(host, words):
    """`run` is an actor until it is told to end: a member like any other, whom nobody supervises."""
    actor_id = words[words.index("--actor-id") + 1]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=host.environment,
    )  # fmt: skip
    host.started.append(process)
    with process.stderr:
        # Its own word, and not the registry's list: that names it before it has read that it is a member.
        said = list(until_joined(process.stderr))
        assert '"event":"joined"' in "".join(said), said
        found = host.ps()[actor_id]
        assert (found["supervised"], found["pid"]) == (False, process.pid)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


def until_joined(lines):
    """The lines of a log up to the one that says `joined`, or to its end."""
    for line in lines:
        yield line
        if '"event":"joined"' in line:
            return
