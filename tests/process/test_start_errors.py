"""A start that cannot succeed says what, why and what to do, exits with its code, and leaves nothing behind."""

import json
import re
import shutil
import signal
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from nodes.model_spec import ModelError, resolve_model

pytestmark = pytest.mark.process

ECHO = ("--model", "echo")
TINY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


DAMAGES = {
    "config.json is missing": lambda model: (model / "config.json").unlink(),
    "config.json cannot be read as JSON": lambda model: (model / "config.json").write_text("{not json"),
    "config.json should hold a JSON object": lambda model: (model / "config.json").write_text("[]"),
    "read as JSON: its values are nested too deeply": lambda model: (model / "config.json").write_text("[" * 200_000),
    "hidden_size should be": lambda model: (model / "config.json").write_text('{"architectures":["LlamaForCausalLM"]}'),
    "model.safetensors is not a complete safetensors file": lambda model: cut(model / "model.safetensors", 100_000),
    "is not a complete safetensors file": lambda model: cut(model / "model.safetensors", 5),
    "has no model.safetensors": lambda model: (model / "model.safetensors").unlink(),
    "model.safetensors.index.json is not a safetensors index": lambda model: (
        (model / "model.safetensors").rename(model / "model.safetensors.index.json").write_text("[" * 200_000)
    ),
    "tokenizer.json is missing": lambda model: (model / "tokenizer.json").unlink(),
    "tokenizer.json is cut off": lambda model: cut(model / "tokenizer.json", 1000),
}


def assert_says(failed, code, words):
    assert failed.returncode == code, failed.stderr
    assert words in failed.stderr
    assert "why:" in failed.stderr
    assert "Traceback" not in failed.stderr


FULL = """
import errno, os, sys

def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

"""


def up_on_full(host, what, *options):
    """`up` where a file system is full: `what` fails, a function of `os`."""
    (host.base / "sitecustomize.py").write_text(f"{FULL}os.{what} = full\n")
    return host.meshctl("up", "--port", str(host.port), *options, PYTHONPATH=str(host.base))


@pytest.mark.parametrize("words", DAMAGES)
def test_what_is_said_of_a_damaged_model(tmp_path, words):
    """Here, and not by a process each: what `up` makes of such an error is the same for all of them."""
    model = shutil.copytree(TINY, tmp_path / "model")
    DAMAGES[words](model)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        resolve_model(str(model))
    assert str(model) in str(caught.value)


# One file that is read as JSON and one that is not; the first deeper than any parser goes.
@pytest.mark.parametrize("words", ["read as JSON: its values are nested too deeply", "tokenizer.json is cut off"])
def test_a_damaged_model(host, words):
    model = shutil.copytree(TINY, host.base / "model")
    DAMAGES[words](model)
    failed = host.meshctl("up", "--model", str(model), "--port", str(host.port))
    assert_says(failed, 6, words)
    assert str(model) in failed.stderr
    host.assert_nothing_left(within_s=1.0)


def test_a_role_run_by_hand_with_a_damaged_model(host):
    """Whatever the role: a gateway would not read the file, and would serve nothing."""
    model = shutil.copytree(TINY, host.base / "model")
    (model / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    config = json.dumps({"model": str(model)})
    assert_says(host.meshctl("run", "detokenizer", "--config", config), 6, "longer than 3 s")
    (model / "tokenizer.json").write_text("{}")
    assert_says(host.meshctl("run", "tokenizer", "--config", config), 6, "tokenizer.json cannot be loaded")
    host.assert_nothing_left(within_s=1.0)


def test_a_port_that_somebody_else_has(host):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        failed = host.meshctl("up", *ECHO, "--port", str(other.getsockname()[1]))
    assert_says(failed, 7, "cannot be listened on")
    assert "another --port" in failed.stderr
    host.assert_nothing_left(within_s=1.0)


def test_a_run_directory_that_cannot_be_made(host):
    blocker = host.base / "file"
    blocker.touch()
    too_long = host.base / ("long" * 30)
    too_long.mkdir()
    for place in (blocker, "/proc/nowhere", too_long):
        failed = host.meshctl("up", *ECHO, "--port", str(host.port), XDG_RUNTIME_DIR=str(place))
        assert failed.returncode in (1, 7), failed.stderr
        assert_says(failed, failed.returncode, str(place))
        assert "XDG_RUNTIME_DIR" in failed.stderr
    host.assert_nothing_left(within_s=1.0)


def test_a_run_directory_that_is_full(host):
    """With no room for a single byte."""
    assert_says(up_on_full(host, "replace", *ECHO), 1, f"{host.run_directory} cannot be written")
    host.assert_nothing_left(within_s=1.0)
    assert not list(host.run_directory.glob(".*")), "drafts"


def test_shared_memory_that_ends_only_when_it_is_taken(host):
    """What the plan has seen free is gone when the pool is made."""
    failed = up_on_full(host, "posix_fallocate", *ECHO, "--mixed", "1", "--kv-memory", "16MiB")
    assert_says(failed, 8, "bytes of shared memory")
    assert "--shm-size" in failed.stderr
    host.assert_nothing_left()


SEEN_BY_THE_PLAN = """
from types import SimpleNamespace as NVMLMemory
NVMLError = OSError
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetMemoryInfo = lambda handle: NVMLMemory(total=81559 << 20, free=80991 << 20)
"""


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed here")
def test_a_device_that_only_the_plan_has_seen(host):
    """An agent that cannot use CUDA says so once, and nobody starts it again and again."""
    (host.base / "pynvml.py").write_text(SEEN_BY_THE_PLAN)
    options = ("--model", "random:tiny-qwen3", "--mixed", "1", "--kv-memory", "16MiB", "--port", str(host.port))
    failed = host.meshctl("up", *options, "--device", "cuda", PYTHONPATH=str(host.base))
    assert_says(failed, 5, "CuPy cannot be imported")
    assert "kvmesh[cuda13]" in failed.stderr
    host.assert_nothing_left()


def test_two_of_one_name_at_once(host):
    first, second = host.up(*ECHO, wait=False), host.up(*ECHO, wait=False)
    ended = host.wait_until(lambda: [p for p in (first, second) if p.poll() is not None], "one gives way")
    (loser,) = ended
    assert loser.returncode == 4, loser.log.read_text()
    assert "is running" in loser.log.read_text()
    winner = second if loser is first else first
    host.wait_ready(winner)
    assert host.say("only one") == "only one"
    winner.send_signal(signal.SIGINT)
    assert winner.wait(30) in (0, 130)
    host.assert_nothing_left()
