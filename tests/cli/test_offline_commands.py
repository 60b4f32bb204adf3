"""Commands that need no mesh: `meshctl models` and `meshctl config`, as the command line runs them."""

import json
import socket
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from cli import main as command_line
from cli.commands import models as models_command
from cli.commands import up as up_command
from cli.errors import BadConfig, BadModel
from cli.exit_codes import ExitCode
from cli.plan.role_configs import CONFIG_TYPES
from mesh.runtime.process_limits import FILES, Limits
from nodes.model_spec import ModelDamaged, known_models
from tests.cli.launches import ids_of
from tests.nodes.checkpoints import LLAMA, write_model, write_modules

GETADDRINFO = socket.getaddrinfo


@pytest.fixture
def meshctl(monkeypatch):
    """Run one command; what it wrote to stdout and to stderr. Errors go through."""
    for name in ("KVMESH_TOPOLOGY", "KVMESH_PORT", "KVMESH_NAME"):
        monkeypatch.delenv(name, raising=False)
    # Whoever runs this may have some.
    monkeypatch.setattr(models_command, "cached_models", list)

    def run(*arguments):
        result = CliRunner().invoke(command_line.app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    return run


def test_models_by_shape_and_size(meshctl):
    listed = {entry["model"]: entry for entry in json.loads(meshctl("models", "-o", "json")[0])}
    assert list(listed) == known_models()
    assert (listed["tiny"]["note"], listed["tiny"]["dtype"]) == ("bundled toy", "float32")
    assert (listed["echo"]["note"], listed["echo"]["num_parameters"]) == ("answers with its prompt", 0)
    half = listed["random:qwen2.5-0.5b"]
    assert (half["num_parameters"], half["num_layers"], half["note"]) == (494_032_768, 24, "random weights")


def test_models_as_a_table(meshctl):
    header, *rows = meshctl("models")[0].splitlines()
    assert header.split() == ["MODEL", "ARCHITECTURE", "LAYERS", "HIDDEN", "CONTEXT", "DTYPE", "PARAMETERS", "NOTE"]
    assert [row.split()[0] for row in rows] == known_models()


def test_what_the_files_of_a_model_say_is_shown_with_the_file(meshctl, tmp_path):
    directory = write_model(tmp_path / "m", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<s>"}')
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    shown = json.loads(meshctl("models", "show", str(directory), "-o", "json")[0])
    assert (shown["model"], shown["path"], shown["architecture"]) == ("m", str(directory), "llama")
    assert (shown["context_length"], shown["longest_context"]["tokens"]) == (512, 1024)
    assert shown["end_tokens"] == [{"id": 2, "said_by": "config.json"}, {"id": 257, "said_by": "tokenizer.json"}]
    parts = dict.fromkeys(("user", "assistant", "system"), "parts")
    assert shown["chat_template"] == {"said_by": "chat_template.jinja", "content": parts}
    said = {"name": "bos_token", "text": "<s>", "said_by": "special_tokens_map.json"}
    assert said in shown["special_tokens"]
    assert shown["vocabulary"] == {"tokens": 301, "embeddings": 300}
    assert shown["size"]["bytes"] == (directory / "model.safetensors").stat().st_size
    assert any("more than the model has embeddings" in note for note in shown["notes"])
    assert any("leaves out messages of the role tool" in note for note in shown["notes"])
    lines = meshctl("models", "show", str(directory))[0].splitlines()
    assert "end tokens      2 (config.json)" in lines
    assert "                257 (tokenizer.json)" in lines
    (directory / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with_own = meshctl("models", "show", str(directory), "--chat-template", str(directory / "own.jinja"))[0]
    assert f"user string, assistant string, system string, tool string ({directory / 'own.jinja'})" in with_own


def test_what_a_vector_of_a_model_is_is_shown(meshctl, tmp_path):
    directory = write_modules(
        write_model(tmp_path / "m", LLAMA), ("Pooling", {"embedding_dimension": 16, "pooling_mode": "mean"}),
        ("Dense", {"in_features": 16, "out_features": 8}), "Normalize",
        config_sentence_transformers__json={"prompts": {"query": "q:\n", "x": ""}, "default_prompt_name": "query"},
        sentence_bert_config__json={"max_seq_length": 128},
    )  # fmt: skip
    shown = json.loads(meshctl("models", "show", str(directory), "-o", "json")[0])
    vectors = {"content": "embedding", "pool": "mean", "dimensions": 8, "normalized": True, "activation": "identity"}
    assert shown["vectors"] == vectors | {"longest_input": 128}
    assert shown["prompts"] == [{"name": "query", "content": r"'q:\n'", "default": True}]
    lines = meshctl("models", "show", str(directory), "--pooling", "last")[0].splitlines()
    assert (
        "vectors         embedding, pool last, dimensions 8, normalized no, activation identity, longest_input 128"
        in lines
    )
    assert r"prompts         query, 'q:\n', default yes" in lines
    assert "makes text      yes" in lines
    assert meshctl("models", "show", "tiny")[0].splitlines()[-2] == "vectors         none"


def test_texts_of_a_model_do_not_steer_the_terminal(meshctl, tmp_path):
    directory = write_model(tmp_path / "m", LLAMA)
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "\x1b[2J\n<s>"}))
    shown = meshctl("models", "show", str(directory))[0]
    assert "\x1b" not in shown
    assert r"bos_token, \x1b[2J\n<s>" in shown


def test_a_damaged_model_is_listed_with_what_is_wrong(meshctl, monkeypatch):
    resolve = models_command.describe_model

    def damaged(name):
        if name == "tiny":
            raise ModelDamaged("its weights are cut short.")
        return resolve(name)

    monkeypatch.setattr(models_command, "describe_model", damaged)
    entry = json.loads(meshctl("models", "-o", "json")[0])[0]
    assert (entry["model"], entry["num_parameters"], entry["note"]) == ("tiny", "", "its weights are cut short.")


def test_config_show_fills_defaults_in_and_overlays(meshctl, tmp_path, monkeypatch):
    file = tmp_path / "mesh.toml"
    file.write_text('model = "echo"\n[kv]\npages = 99\n')
    monkeypatch.setenv("KVMESH_PORT", "4321")
    shown = json.loads(meshctl("config", "show", "-o", "json", "-f", str(file))[0])
    assert (shown["model"], shown["kv"]["pages"], shown["kv"]["page_size"], shown["port"]) == ("echo", 99, 16, 4321)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'model = "echo"\nmixed = 2\nserved_name = ["a", "b \\" c"]\n[kv]\nmemory = "64MiB"\n',
        'model = "/not/here"\n[roles.gateway]\nmax_inflight = 5\nsampling_defaults = {temperature = 0.5}\n',
    ],
)
def test_what_is_shown_is_a_topology_file_that_gives_the_same_again(meshctl, tmp_path, text):
    file, again = tmp_path / "mesh.toml", tmp_path / "again.toml"
    file.write_text(text)
    written = meshctl("config", "show", "-f", str(file))[0]
    again.write_text(written)
    assert meshctl("config", "show", str(again))[0] == written
    shown = json.loads(meshctl("config", "show", "-o", "json", str(file))[0])
    without = ("model", "kv") if "not/here" in text else ("kv",)
    derived = {name for name, value in shown.items() if value is None}
    assert derived == ({"context_length", "threads"} if "model" in without else set()), "the rest follows, and is said"
    found = tomllib.loads(written)
    assert found["prefill_tp"] == 1
    assert found["roles"] if "roles" in text else "roles" not in found


def test_config_schema_describes_every_role(meshctl):
    schema = json.loads(meshctl("config", "schema")[0])
    definitions = schema["$defs"]
    settings = definitions["Settings"]["properties"]
    assert schema["$ref"] == "#/$defs/Settings"
    assert list(settings["roles"]["properties"]) == list(CONFIG_TYPES)
    assert not settings["roles"]["additionalProperties"]
    for role, config_type in CONFIG_TYPES.items():
        reference = settings["roles"]["properties"][role]["$ref"].removeprefix("#/$defs/")
        described = definitions[reference]
        assert set(described["properties"]) == set(config_type.__struct_fields__)
        assert "required" not in described, "an override names only what it changes"
        assert not described["additionalProperties"]


def test_config_validate_goes_as_far_as_up(meshctl, tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text('model = "echo"\nmixed = 1\n[kv]\npages = 257\n')
    out, errors = meshctl("config", "validate", str(file))
    assert out == ""
    assert f"mesh.toml is fine: {len(ids_of('mixed-0'))} actors, KV pools of" in errors
    assert "KV: 4,096 tokens; context 4,096 of the model's 131,072: for more, use --kv-pages\n" in errors
    assert meshctl("config", "validate", "-f", str(file)) == meshctl("config", "validate", str(file))
    assert meshctl("config", "show", "-f", str(file)) == meshctl("config", "show", str(file))
    assert "the configuration is fine" in meshctl("config", "validate")[1]
    file.write_text('model = "echo"\nprot = 1\n')
    for command in ("validate", "show"):
        with pytest.raises(BadConfig, match=r"(?s)no setting prot.*did you mean port\?"):
            meshctl("config", command, str(file))
    file.write_text('model = "/nowhere/at/all"\n')
    with pytest.raises(BadModel, match="nowhere"):
        meshctl("config", "validate", str(file))


def test_ctrl_c_is_an_exit_code_and_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(models_command, "models", interrupted)
    assert ended(monkeypatch, capsys, "models")[0] == ExitCode.INTERRUPTED


def ended(monkeypatch, capsys, *arguments):
    """Exit code and stderr of a command that ends early."""
    monkeypatch.setattr(sys, "argv", ["meshctl", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stauts"], "Did you mean 'status'"),
        (["ps", "--nme", "x"], "--name"),
        (["up", "--port", "x"], "--port"),
        (["up", "--prefill"], "--prefill"),
        (["chat", "--url", "foo", "hi"], "--url foo is not a valid address"),
        (["chat", "--url", "http://x:99999", "hi"], "--url http://x:99999 is not a valid address"),
        (["config", "shwo"], "Did you mean 'show'?"),
        (["drain"], "ACTOR"),
        (["run", "poet"], "invalid choice: 'poet'"),
        (["run", "registry", "--epoch", "x"], "invalid int value"),
    ],
)
def test_a_wrong_command_line_is_told_like_every_other_error(monkeypatch, capsys, arguments, words):
    code, told = ended(monkeypatch, capsys, *arguments)
    assert code == ExitCode.USAGE
    assert words in told.splitlines()[0]
    assert [line[:6] for line in told.splitlines()] == ["error:", "  why:", "  do: "]
    assert (
        f"`meshctl {arguments[0] if arguments[0] in ('ps', 'up', 'drain', 'run', 'config') else '--help'}" in told
        or "chat" in arguments
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--kv-memory", "10XB"), ExitCode.BAD_CONFIG, "kv.memory is '10XB', but must be an amount of memory"),
        (("--kv-memory", "10MiB", "--kv-pages", "5"), ExitCode.BAD_CONFIG, "given twice"),
        (("--kv-memory", "100TiB"), ExitCode.NO_MEMORY, "do not fit"),
        (("--context-length", "999999999"), ExitCode.BAD_CONFIG, "a context of 999999999 tokens"),
        (("--model", "random:none"), ExitCode.BAD_MODEL, "random:none"),
        (("--host", "999.1.1.1"), ExitCode.CANNOT_BIND, "--host 999.1.1.1 is not a valid address"),
        (("--host", "192.0.2.1"), ExitCode.CANNOT_BIND, "give an address of this machine with --host"),
        (("--model", "a/b@"), ExitCode.BAD_MODEL, "there is no revision after the @"),
        (("--model", "a/b@ c"), ExitCode.BAD_MODEL, "' c' is not a branch"),
    ],
)
def test_what_cannot_be_started_is_told_by_its_option_and_leaves_nothing(
    monkeypatch, capsys, tmp_path, arguments, code, words
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # As a resolver without a network says it at once.
    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
    model = () if "--model" in arguments else ("--model", "echo")
    found, told = ended(monkeypatch, capsys, "up", *model, *arguments)
    assert found == code
    assert words in told
    assert list(tmp_path.glob("*/*")) == [], "no run directory of a mesh that never was"


def numeric_only(host, port, **options):
    return GETADDRINFO(host, port, **options | {"flags": socket.AI_NUMERICHOST | socket.AI_PASSIVE})


def test_every_help_ends_with_an_example(meshctl):
    for command in ((), ("config",), ("config", "show"), ("up",)):
        assert "Example: meshctl " in meshctl(*command, "--help")[0]


def test_versions(meshctl):
    assert meshctl("--version") == meshctl("version")
    assert meshctl("version")[0].startswith("meshctl ")
    assert set(json.loads(meshctl("version", "-o", "json")[0])) == {"kvmesh", "protocol", "python"}


@pytest.mark.parametrize(("name", "value"), [("KVMESH_LOG_LEVEL", "loud"), ("KVMESH_LOG_FORMAT", "xml")])
@pytest.mark.parametrize("arguments", [("up", "-d"), ("up",), ("config", "show"), ("run", "registry")])
def test_what_the_log_cannot_be_set_to_is_said_before_anything_starts(
    monkeypatch, capsys, tmp_path, name, value, arguments
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    code, told = ended(monkeypatch, capsys, *arguments)
    assert code == ExitCode.BAD_CONFIG
    assert f"{name} is '{value}', but must be one of " in told
    assert [line[:6] for line in told.splitlines()] == ["error:", "  why:", "  do: "]


def test_a_foreign_variable_is_warned_of_and_the_command_goes_on(meshctl, monkeypatch):
    monkeypatch.setenv("KVMESH_PROT", "1")
    out, errors = meshctl("config", "show")
    assert tomllib.loads(out)["port"] == 8000
    assert errors == (
        "warning: the environment variable KVMESH_PROT is not read: there is no such setting; "
        "did you mean KVMESH_PORT?\n"
    )


def test_a_mesh_without_groups_of_a_kind_and_too_few_descriptors_are_said_at_start(meshctl, monkeypatch):
    monkeypatch.setattr(up_command, "read_limits", lambda: Limits({FILES: 1024}, {}))
    out, errors = meshctl("up", "--model", "echo", "--decode", "0", "--dry-run")
    assert out.startswith("meshctl run registry")
    group, files = (line for line in errors.splitlines() if line.startswith("note: "))
    assert group == "note: there is no decode group: prefill groups decode, too"
    assert files.startswith("note: `ulimit -Hn` lets a gateway hold about 826 connections, not the 16,384 of")
    assert "note: there is no prefill group" in meshctl("up", "--model", "echo", "--prefill", "0", "--dry-run")[1]
    monkeypatch.setattr(up_command, "read_limits", lambda: Limits({}, {}))
    assert "note: " not in meshctl("up", "--model", "echo", "--mixed", "1", "--dry-run")[1]


def test_an_unexpected_error_ends_in_the_words_of_all_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ended(monkeypatch, capsys, "version")
    try:
        raise KeyError("loud")
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert [line[:6] for line in told.splitlines()[-3:]] == ["error:", "  why:", "  do: "]


@pytest.mark.parametrize("command", ["down", "drain worker", "restart worker", "release", "resume"])
@pytest.mark.parametrize("seconds", ["-1", "0"])
def test_who_waits_waits_for_some_time(command, seconds):
    result = CliRunner().invoke(command_line.app, [*command.split(), "--timeout", seconds], env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.USAGE
    assert "greater than or equal to 0.1" in result.stderr
