"""Commands that need no mesh: `meshctl models` and `meshctl config`, as the command line runs them."""

import json
import sys

import pytest
from typer.testing import CliRunner

from cli import main as command_line
from cli.commands import models as models_command
from cli.errors import BadConfig, BadModel
from cli.exit_codes import ExitCode
from cli.topology import CONFIG_TYPES
from nodes.model_spec import ModelDamaged, known_models


@pytest.fixture
def meshctl(monkeypatch):
    """Run one command; what it wrote to stdout and to stderr. Errors go through."""
    for name in ("KVMESH_TOPOLOGY", "KVMESH_PORT"):
        monkeypatch.delenv(name, raising=False)

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


def test_a_damaged_model_is_listed_with_what_is_wrong(meshctl, monkeypatch):
    resolve = models_command.resolve_model

    def damaged(name):
        if name == "tiny":
            raise ModelDamaged("its weights are cut short.")
        return resolve(name)

    monkeypatch.setattr(models_command, "resolve_model", damaged)
    entry = json.loads(meshctl("models", "-o", "json")[0])[0]
    assert (entry["model"], entry["num_parameters"], entry["note"]) == ("tiny", "", "its weights are cut short.")


def test_config_show_fills_defaults_in_and_overlays(meshctl, tmp_path, monkeypatch):
    file = tmp_path / "mesh.toml"
    file.write_text('model = "echo"\n[kv]\npages = 99\n')
    monkeypatch.setenv("KVMESH_PORT", "4321")
    shown = json.loads(meshctl("config", "show", "-f", str(file))[0])
    assert (shown["model"], shown["kv"]["pages"], shown["kv"]["page_size"], shown["port"]) == ("echo", 99, 16, 4321)


def test_what_is_shown_can_be_used_as_it_is(meshctl, tmp_path):
    """Written as TOML, the defaults give the same settings again."""
    shown = json.loads(meshctl("config", "show")[0])
    plain = {key: value for key, value in shown.items() if not isinstance(value, dict) and value is not None}
    file = tmp_path / "again.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in plain.items()))
    assert json.loads(meshctl("config", "show", "-f", str(file))[0]) == shown


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
    file.write_text('model = "echo"\nmixed = 1\n[kv]\npages = 64\n')
    out, errors = meshctl("config", "validate", str(file))
    assert out == ""
    assert "mesh.toml is fine: 7 actors, KV pools of" in errors
    file.write_text('model = "echo"\nprot = 1\n')
    with pytest.raises(BadConfig, match="prot"):
        meshctl("config", "validate", str(file))
    file.write_text('model = "/nowhere/at/all"\n')
    with pytest.raises(BadModel, match="nowhere"):
        meshctl("config", "validate", str(file))


def test_errors_become_exit_codes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["meshctl", "config", "show", "-f", str(tmp_path / "none.toml")])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == BadConfig.exit_code
    assert "none.toml cannot be read" in capsys.readouterr().err


def test_ctrl_c_is_an_exit_code_and_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["meshctl", "models"])
    monkeypatch.setattr(command_line, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == ExitCode.INTERRUPTED
