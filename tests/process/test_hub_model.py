"""A mesh that serves a model of the hub: fetched by `up`, named, templated and sampled as asked, and then its own."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from tests.cli.served_hub import served_hub

pytestmark = pytest.mark.process

TINY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"
NAMES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def checkpoint():
    """The bundled model in float16, with a way of sampling and without a template."""
    weights = {name: tensor.half() for name, tensor in load_file(TINY / "model.safetensors").items()}
    config = json.loads((TINY / "config.json").read_text()) | {"dtype": "float16"}
    generation = json.loads((TINY / "generation_config.json").read_text())
    files = {name: (TINY / name).read_bytes() for name in NAMES}
    return files | {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation | {"temperature": 0.0}).encode(),
        "model.safetensors": save(weights, {"format": "pt"}),
        "pytorch_model.bin": b"nobody wants it",
    }


@pytest.fixture
def hub():
    with served_hub() as hub:
        yield hub


def variables(host, hub):
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(host.base / "hf"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}


def test_a_model_of_the_hub_is_served_and_stays_when_the_hub_has_gone(host, hub, checkpoint):
    sha = hub.add("org/half", checkpoint, "v1")
    template = host.base / "template.jinja"
    template.write_text((TINY / "chat_template.jinja").read_text())
    names = ("--served-name", "first", "--served-name", "second")
    mesh = host.up(
        "--model", "org/half@v1", "--mixed", "1", *names, "--chat-template", str(template), **variables(host, hub)
    )
    assert sorted(set(hub.fetched())) == sorted(checkpoint.keys() - {"pytorch_model.bin"})
    said = mesh.log.read_text()
    assert f"org/half@v1 is {sha[:12]}, in {host.base}/hf/hub/models--org--half/snapshots/{sha}" in said
    assert "org/half has float16 weights: computed in " in said
    assert "use org/half's defaults: temperature 0" in said
    with urllib.request.urlopen(host.url + "/v1/models") as response:
        cards = json.loads(response.read())["data"]
    assert [(card["id"], card["root"]) for card in cards] == [(name, f"org/half@{sha}") for name in ("first", "second")]

    question = "What is 37 + 45?"
    answer = host.say(question, model="first", max_tokens=16)
    assert answer == host.say(question, model="second", max_tokens=16, temperature=0), "the makers' own way is greedy"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        host.say(question, model="org/half")

    hub.log.clear()
    hub.is_down = True
    before = host.ps()["worker-mixed-0"]
    os.kill(before["pid"], signal.SIGKILL)
    host.wait_until(
        lambda: (now := host.ps()["worker-mixed-0"])["epoch"] > before["epoch"] and now["state"] == "ready",
        "the worker is back",
    )
    assert host.say(question, model="first", max_tokens=16) == answer
    assert hub.log == [], "whoever starts again asks nobody"
    mesh.send_signal(signal.SIGINT)
    assert mesh.wait(30) == 0
    host.assert_nothing_left()


def test_an_up_that_is_ended_while_it_fetches_leaves_no_half_file(host, hub, checkpoint):
    hub.add("org/half", checkpoint)
    hub.stalls.add("model.safetensors")
    mesh = host.up("--model", "org/half", wait=False, **variables(host, hub))
    host.wait_until(lambda: "model.safetensors" in hub.fetched(), "it fetches weights")
    assert list(host.base.glob("hf/hub/*/blobs/*.incomplete"))
    mesh.terminate()
    assert mesh.wait(20) == 130
    assert not list(host.base.glob("hf/hub/*/blobs/*.incomplete"))
    assert list(host.base.glob("hf/hub/*/snapshots/*/tokenizer.json")), "whole files are kept"
    host.assert_nothing_left(within_s=1.0)
