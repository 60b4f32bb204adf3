import pytest

from cli.errors import BadConfig
from cli.settings import Settings, load_settings, parse_bytes


def write(tmp_path, text):
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return path


def test_the_last_source_wins(tmp_path):
    file = write(tmp_path, 'port = 1111\nmodel = "echo"\nmax_running = 5\n[kv]\npages = 10\n')
    environment = {"KVMESH_PORT": "2222", "KVMESH_MAX_RUNNING": "6", "HOME": "/", "KVMESH_TOPOLOGY": "x"}
    settings = load_settings(file, environment, {"port": 3333, "kv__pages": None, "name": None})
    assert (settings.port, settings.model, settings.max_running, settings.kv.pages) == (3333, "echo", 6, 10)


def test_nested_environment_variables():
    settings = load_settings(None, {"KVMESH_KV__MEMORY": "1GiB", "KVMESH_SUPERVISION__RESTART_BUDGET": "3"}, {})
    assert settings.kv.memory == "1GiB"
    assert settings.supervision.restart_budget == 3


def test_roles_tables_are_kept(tmp_path):
    file = write(tmp_path, "[roles.gateway]\nmax_inflight = 7\n")
    assert load_settings(file, {}, {}).roles == {"gateway": {"max_inflight": 7}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 'x'", "port"),
        ("port = 0", "port"),
        ("prot = 1", "prot"),
        ("name = 'UPPER'", "name"),
        ("[kv]\npages = 1", "pages"),
        ("port = ", "not TOML"),
        ("dtype = 'int4'", "dtype"),
    ],
)
def test_a_bad_file_says_which_value(tmp_path, text, words):
    with pytest.raises(BadConfig, match=words) as caught:
        load_settings(write(tmp_path, text), {}, {})
    assert caught.value.do


def test_a_missing_file(tmp_path):
    with pytest.raises(BadConfig, match="cannot be read"):
        load_settings(tmp_path / "none.toml", {}, {})


def test_bad_environment_and_options_name_their_source():
    with pytest.raises(BadConfig, match="KVMESH_PORT"):
        load_settings(None, {"KVMESH_PORT": "many"}, {})
    with pytest.raises(BadConfig, match="KVMESH_NOTHING"):
        load_settings(None, {"KVMESH_NOTHING": "1"}, {})
    with pytest.raises(BadConfig, match="option for max running"):
        load_settings(None, {}, {"max_running": 0})
    with pytest.raises(BadConfig, match="not a table"):
        load_settings(None, {"KVMESH_MODEL__PAGES": "1", "KVMESH_MODEL": "echo"}, {})


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        ({}, (1, 1, 0)),
        ({"mixed": 2}, (0, 0, 2)),
        ({"prefill": 2}, (2, 1, 0)),
        ({"decode": 3}, (1, 3, 0)),
        ({"prefill": 1, "mixed": 1}, (1, 0, 1)),
        ({"prefill": 0, "decode": 1}, (0, 1, 0)),
        ({"mixed": 0}, (1, 1, 0)),
    ],
)
def test_groups(given, groups):
    assert Settings(**given).groups == groups


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", 1 << 20), ("1MiB", 1 << 20), ("1 m", 1 << 20), ("2G", 2 << 30), ("1.5kb", 1536), ("1TiB", 1 << 40)],
)
def test_amounts_of_memory(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "-1", "1 PiB", "1e9"])
def test_what_is_no_amount(text):
    with pytest.raises(BadConfig, match="no amount"):
        parse_bytes(text)
