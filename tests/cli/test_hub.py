"""Models of the hub, fetched by the real client from a hub that is served here."""

import json
import os
import shutil
import socket

import pytest
from huggingface_hub import close_session, constants
from typer.testing import CliRunner

from cli.errors import BadModel
from cli.hub.name import HubName, parse_hub_name
from cli.main import app
from cli.plan.model import plan_model
from cli.plan.settings import Settings
from cli.supervisor.told.progress import Progress
from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec.weight_index import expected_shapes
from tests.cli.launches import ids_of
from tests.cli.served_hub import TOKEN, served_hub
from tests.nodes.checkpoints import LLAMA, fake_spec, write_model, write_modules, write_safetensors

TEMPLATE = "{{ messages[0].content }}"


def checkpoint(tmp_path, **config):
    """Files of a small Llama in two shards, with things beside them that nobody wants."""
    config = LLAMA | {"torch_dtype": "float32"} | config
    shapes = expected_shapes(fake_spec(config))
    names = sorted(shapes)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map, files = {}, {}
    for shard, part in zip(shards, (names[:5], names[5:]), strict=True):
        write_safetensors(tmp_path / shard, {name: shapes[name] for name in part})
        files[shard] = (tmp_path / shard).read_bytes()
        weight_map |= dict.fromkeys(part, shard)
    return files | {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": byte_tokenizer_json(config["vocab_size"]).encode(),
        "tokenizer_config.json": b"{}",
        "generation_config.json": b'{"temperature": 0.5}',
        "chat_template.jinja": TEMPLATE.encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "README.md": b"# A model",
        "pytorch_model.bin": b"x" * 9000,
        "consolidated.safetensors": b"x" * 9000,
    }


WANTED = sorted(
    {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    | {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
)


class Client:
    """Has a cache of its own, and knows a hub: `meshctl up`'s look for a model, in this process and fast."""

    def __init__(self, tmp_path, endpoint, monkeypatch):
        self.home = tmp_path / "hf"
        self.work = tmp_path / "work"
        self.work.mkdir()
        self.said = tmp_path / "said"
        self._monkeypatch = monkeypatch
        # The client reads its variables once, when it is imported.
        for name, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_CACHE": str(self.home / "hub"), "HF_TOKEN_PATH": str(self.home / "token"),
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.chdir(self.work)

    def plan(self, model, *, offline=False, token=None):
        with self._monkeypatch.context() as patch, self.said.open("wb") as said:
            patch.setattr(constants, "HF_HUB_OFFLINE", offline)
            patch.delenv("HF_TOKEN", raising=False)
            if token is not None:
                patch.setenv("HF_TOKEN", token)
            try:
                return plan_model(Settings(model=model), Progress(said.fileno()), fetches=True)
            finally:
                close_session()

    def planned(self, model, **options):
        plan = self.plan(model, **options)
        return plan.argument, plan.origin, plan.spec.name, plan.spec.dtype, self.said.read_text()

    def refused(self, model, **options):
        with pytest.raises(BadModel) as caught:
            self.plan(model, **options)
        assert caught.value.why
        return str(caught.value)


@pytest.fixture
def hub():
    with served_hub() as hub:
        yield hub


@pytest.fixture
def client(tmp_path, hub, monkeypatch):
    return Client(tmp_path, hub.url, monkeypatch)


def test_only_the_files_needed_are_fetched_and_once(tmp_path, hub, client):
    sha = hub.add("org/small", checkpoint(tmp_path))
    path, origin, name, dtype, said = client.planned("org/small")
    assert sorted(hub.fetched()) == WANTED
    assert path == str(client.home / "hub" / "models--org--small" / "snapshots" / sha)
    assert (origin, name, dtype) == (f"org/small@{sha}", "org/small", "float32")
    assert f"asking {hub.url} for org/small" in said
    assert "org/small [########################] " in said
    hub.log.clear()
    again = client.planned("org/small")
    assert (again[0], hub.fetched()) == (path, [])
    assert "#" not in again[-1]


def test_what_a_mesh_serves_stays_that_commit_when_the_branch_moves_on(tmp_path, hub, client):
    files = checkpoint(tmp_path)
    first = hub.add("org/small", files, "main", "v1")
    old, *_ = client.planned("org/small@v1")
    second = hub.add("org/small", files | {"chat_template.jinja": b"other " + TEMPLATE.encode()}, "main")
    hub.log.clear()
    new, origin, *_ = client.planned("org/small")
    assert hub.fetched() == ["chat_template.jinja"], "the same bytes are not fetched twice"
    assert (old.rpartition("/")[2], new.rpartition("/")[2]) == (first, second)
    assert origin.endswith(f"@{second}")
    with open(f"{old}/chat_template.jinja") as kept:
        assert kept.read() == TEMPLATE
    assert client.planned(f"org/small@{first}")[0] == old


def test_a_connection_that_breaks_is_made_again(tmp_path, hub, client):
    hub.add("org/small", checkpoint(tmp_path))
    shard = "model-00002-of-00002.safetensors"
    hub.cuts[shard] = 1000
    path, *_ = client.planned("org/small")
    assert hub.fetched().count(shard) == 2
    with open(f"{path}/{shard}", "rb") as file:
        assert file.read() == (tmp_path / shard).read_bytes()


def test_without_a_network_the_cache_is_enough_and_is_said_to_be_it(tmp_path, hub, client):
    hub.add("org/small", checkpoint(tmp_path), "main", "v1")
    path, *_ = client.planned("org/small@v1")
    offline = client.planned("org/small@v1", offline=True)
    assert offline[0] == path
    assert "HF_HUB_OFFLINE is set: org/small@v1 is taken from the cache" in offline[-1]
    hub.is_down = True
    down = client.planned("org/small@v1")
    assert down[0] == path
    assert f"{hub.url} does not answer: org/small@v1 is taken from the cache" in down[-1]
    (tmp_path / "hf" / "hub").joinpath(path, "model-00001-of-00002.safetensors").unlink()
    said = client.refused("org/small@v1", offline=True)
    assert "HF_HUB_OFFLINE is set, and" in said
    assert "hf download org/small --revision v1 --local-dir DIR" in said


def test_a_snapshot_of_an_older_release_is_completed_and_offline_served_with_a_note(tmp_path, hub, client):
    named = {
        "special_tokens_map.json": b'{"bos_token": "<s>"}',
        "additional_chat_templates/rag.jinja": b"{{ messages }}",
    }
    hub.add("org/small", checkpoint(tmp_path) | named)
    path, *_ = client.planned("org/small")
    assert {"special_tokens_map.json", "rag.jinja"} < set(hub.fetched())
    complete = client.planned("org/small", offline=True)
    assert "older release" not in complete[-1], "that there is no added_tokens.json is known since then"
    # As a release left it that did not read these files.
    os.unlink(f"{path}/special_tokens_map.json")
    shutil.rmtree(client.home / "hub" / "models--org--small" / ".no_exist")
    offline = client.planned("org/small", offline=True)
    assert "an older release fetched it without special_tokens_map.json and added_tokens.json" in offline[-1]
    assert client.plan("org/small").spec.special_tokens == {"bos_token": "<s>"}
    assert "older release" not in client.planned("org/small", offline=True)[-1]


def test_a_template_that_cannot_be_used_is_said_before_weights_are_fetched(tmp_path, hub, client):
    hub.add("org/small", checkpoint(tmp_path) | {"chat_template.jinja": b"{{ 1"})
    assert "cannot be compiled" in client.refused("org/small")
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_what_is_cached_in_part_is_completed(tmp_path, hub, client):
    hub.add("org/small", checkpoint(tmp_path))
    path, *_ = client.planned("org/small")
    os.unlink(f"{path}/model-00001-of-00002.safetensors")
    shutil.rmtree(client.home / "hub" / "models--org--small" / "blobs")
    os.unlink(f"{path}/tokenizer.json")
    hub.log.clear()
    client.planned("org/small")
    assert {"tokenizer.json", "model-00001-of-00002.safetensors"} <= set(hub.fetched())


@pytest.mark.parametrize("has_shards", [True, False])
def test_of_a_single_file_beside_an_index_only_the_file_is_fetched(tmp_path, hub, client, has_shards):
    files = checkpoint(tmp_path)
    write_safetensors(tmp_path / "single", expected_shapes(fake_spec(LLAMA)))
    files["model.safetensors"] = (tmp_path / "single").read_bytes()
    hub.add("org/m", {name: data for name, data in files.items() if has_shards or "-of-" not in name})
    client.planned("org/m")
    assert [name for name in hub.fetched() if name.endswith(".safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("without", "extra", "words"),
    [
        (["tokenizer.json"], ["tokenizer.model"], "tokenizer.json is missing (found only tokenizer.model"),
        (["model.safetensors.index.json"], [], "no model.safetensors.index.json (found only pytorch_model.bin"),
        (["config.json"], [], "config.json is missing"),
    ],
)
def test_a_checkpoint_of_other_files_says_what_is_missing_and_fetches_none(
    tmp_path, hub, client, without, extra, words
):
    files = checkpoint(tmp_path) | dict.fromkeys(extra, b"x")
    hub.add("org/old", {name: data for name, data in files.items() if name not in without})
    said = client.refused("org/old")
    assert "the model org/old cannot be served" in said
    assert words in said
    assert hub.fetched() == []


def test_weights_of_what_is_not_served_are_not_fetched(tmp_path, hub, client):
    hub.add("org/mamba", checkpoint(tmp_path, architectures=["MambaForCausalLM"]))
    assert "MambaForCausalLM" in client.refused("org/mamba")
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_what_makes_its_vectors_is_fetched_too(tmp_path, hub, client):
    directory = write_modules(
        write_model(tmp_path / "m", LLAMA), ("Pooling", {"embedding_dimension": 16, "pooling_mode": "mean"}),
        ("Dense", {"in_features": 16, "out_features": 8}), "Normalize",
        config_sentence_transformers__json={"prompts": {"query": "q: "}},
        sentence_bert_config__json={"max_seq_length": 99},
    )  # fmt: skip
    found = (path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}
    hub.add("org/vectors", files | {"onnx/config.json": b"{}", "2_Dense/pytorch_model.bin": b"x"})
    plan = client.plan("org/vectors")
    assert sorted(hub.fetched()) == sorted(os.path.basename(name) for name in files)
    assert plan.spec.pooling.num_dimensions(16) == 8
    assert (plan.spec.pooling.prompts, plan.spec.pooling.max_length) == ({"query": "q: "}, 99)
    hub.log.clear()
    assert (client.plan("org/vectors", offline=True).spec, hub.log) == (plan.spec, [])
    del files["2_Dense/model.safetensors"]
    hub.add("org/cut", files)
    assert "has no 2_Dense/model.safetensors, though its modules.json names it" in client.refused("org/cut")
    assert "model.safetensors" not in hub.fetched()


def test_a_gated_repository_says_where_to_accept_and_a_token_opens_it(tmp_path, hub, client):
    hub.add("org/gated", checkpoint(tmp_path), access="gated")
    said = client.refused("org/gated")
    assert "only to those who have accepted its conditions" in said
    assert f"accept them at {hub.url}/org/gated" in said
    assert "HF_TOKEN" in said
    assert "refuses" in client.refused("org/gated", token="hf_wrong")
    assert client.planned("org/gated", token=TOKEN)[2] == "org/gated"


def test_an_unknown_repository_or_revision_says_which(tmp_path, hub, client):
    hub.add("org/small", checkpoint(tmp_path))
    said = client.refused("org/smal")
    assert "has no such repository or does not show it to you, and there is no such directory" in said
    assert "no revision 'v9' of it" in client.refused("org/small@v9")


def test_a_hub_that_cannot_be_reached_says_how_to_go_on_without(tmp_path, monkeypatch):
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        said = Client(tmp_path, endpoint, monkeypatch).refused("org/small")
    assert f"{endpoint} cannot be reached" in said
    assert "`hf download org/small --local-dir DIR`, then `--model DIR`" in said


def test_a_directory_of_that_name_goes_first_and_that_is_said(tmp_path, hub, client):
    files = checkpoint(tmp_path)
    directory = client.work / "org" / "small"
    directory.mkdir(parents=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    path, origin, name, _, said = client.planned("org/small")
    assert (path, origin, name) == (str(directory), "", "small")
    assert f"org/small is the directory {directory} here, which takes precedence over a model of the hub" in said
    assert hub.log == []


def test_looking_at_a_mesh_fetches_nothing_and_says_so(tmp_path, hub, client, monkeypatch):
    monkeypatch.delenv("KVMESH_TOPOLOGY", raising=False)

    def meshctl(*arguments):
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    hub.add("org/small", checkpoint(tmp_path))
    file = client.work / "mesh.toml"
    file.write_text('model = "org/small"\nmixed = 1\n')
    said = meshctl("config", "validate", str(file))[1]
    assert "fine as far as it can be checked without the model" in said
    assert "`meshctl up --model org/small` fetches it" in said
    with pytest.raises(BadModel, match="org/small is not on this machine"):
        meshctl("up", "--dry-run", "--model", "org/small")
    assert "org/small" not in meshctl("models")[0], "there is no cache at all yet"
    assert hub.log == []
    path, *_ = client.planned("org/small")
    hub.log.clear()
    assert f"is fine: {len(ids_of('mixed-0'))} actors" in meshctl("config", "validate", str(file))[1]
    assert meshctl("up", "--dry-run", "--model", "org/small")[0].count(path) >= 4, "every actor is told the snapshot"
    (cached,) = [entry for entry in json.loads(meshctl("models", "-o", "json")[0]) if entry["model"] == "org/small"]
    assert (cached["architecture"], cached["note"]) == ("llama", "in the hub's cache")
    assert hub.log == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct@refs/pr/3", HubName("Qwen/Qwen2.5-0.5B-Instruct", "refs/pr/3")),
        ("a/b@0123abc", HubName("a/b", "0123abc")),
        ("/org/name", None),
        ("./name", None),
        ("../name", None),
        ("org/name/more", None),
        ("org/name@", None),
        ("gpt2", None),
        ("org/.hidden", None),
    ],
)
def test_names_of_the_hub(text, name):
    assert parse_hub_name(text) == name
    assert name is None or str(name) == text
