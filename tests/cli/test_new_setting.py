"""What a new setting takes: the line that declares it, with the text below it, and the field of who reads it.

Here both are added to what is shipped, and everything that shows or reads settings has it.
"""

import json
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from cli import main as command_line
from cli.arguments.options import with_options
from cli.arguments.up import options_of_settings
from cli.commands import config as config_command
from cli.errors import BadConfig
from cli.plan import overrides, sources
from cli.plan.overrides import configured
from cli.plan.settings import KVSettings, Positive, Settings
from cli.plan.sources import foreign_variables, load_settings
from nodes.gateway.config import GatewayConfig
from tests.cli.refused import refused
from tools import settings_page


class MoreOfKV(KVSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of each worker, with cats."""

    shelf: str = "top"
    """Which shelf pages lie on.

    It is dusted on Mondays."""


class MoreSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    most_cats: Positive = 3
    """Most cats that may ask at once."""
    kv: MoreOfKV = MoreOfKV()


class CatGateway(GatewayConfig, frozen=True, kw_only=True):
    most_cats: int = 1


@pytest.fixture
def declared_so(monkeypatch):
    for module in (sources, overrides, config_command, settings_page):
        monkeypatch.setattr(module, "Settings", MoreSettings)


@pytest.mark.usefixtures("declared_so")
def test_a_new_setting_is_in_every_source(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text('most_cats = 4\n[kv]\nshelf = "low"\n')
    settings = load_settings(file, {}, {})
    assert (settings.most_cats, settings.kv.shelf) == (4, "low")
    settings = load_settings(file, {"KVMESH_MOST_CATS": "5", "KVMESH_KV__SHELF": "mid"}, {"kv__shelf": "own"})
    assert (settings.most_cats, settings.kv.shelf) == (5, "own")
    assert "did you mean KVMESH_MOST_CATS?" in foreign_variables({"KVMESH_MOST_CAT": "1"})[0]
    with refused(BadConfig, "KVMESH_MOST_CATS", why="most_cats is '0', but must be a whole number of at least 1"):
        load_settings(file, {"KVMESH_MOST_CATS": "0"}, {})
    with refused(BadConfig, "--most-cats cannot be used", why="most_cats is 0"):
        load_settings(file, {}, {"most_cats": 0})


def test_a_new_setting_is_an_option_of_up():
    seen = []
    app = typer.Typer()
    app.command()(with_options(options_of_settings(MoreSettings))(lambda **options: seen.append(options)))
    assert CliRunner().invoke(app, ["--most-cats", "7", "--kv-shelf", "low"]).exit_code == 0
    assert (seen[0]["most_cats"], seen[0]["kv__shelf"], seen[0]["port"]) == (7, "low", None)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).stdout
    assert "Most cats that may ask at once." in shown
    assert "Which shelf pages lie on." in shown
    assert "Mondays" not in shown, "the rest is for the page"


@pytest.mark.usefixtures("declared_so")
def test_a_new_setting_reaches_the_role_that_has_its_name():
    needed = {"model_name": "m", "context_length": 8}
    assert configured(CatGateway, MoreSettings(most_cats=6), **needed).most_cats == 6
    assert configured(CatGateway, MoreSettings(most_cats=6), **needed, port=1).port == 1, "what is planned goes first"


@pytest.mark.usefixtures("declared_so")
def test_a_new_setting_is_shown_by_config_and_on_the_page(monkeypatch):
    monkeypatch.setenv("KVMESH_MOST_CATS", "9")
    shown = CliRunner().invoke(command_line.app, ["config", "show"])
    assert tomllib.loads(shown.stdout)["most_cats"] == 9
    schema = json.loads(CliRunner().invoke(command_line.app, ["config", "schema"]).stdout)["$defs"]
    assert schema["MoreSettings"]["properties"]["most_cats"]["minimum"] == 1
    assert schema["MoreSettings"]["properties"]["most_cats"]["description"] == "Most cats that may ask at once."
    assert schema["MoreOfKV"]["properties"]["shelf"]["default"] == "top"
    page = settings_page.page()
    assert "| `most_cats` | `--most-cats` | `3` | Most cats that may ask at once. |" in page
    assert '| `shelf` | `--kv-shelf` | `"top"` | Which shelf pages lie on. It is dusted on Mondays. |' in page


def test_options_of_up_are_the_settings_that_words_can_set():
    shown = CliRunner().invoke(command_line.app, ["up", "--help"], env={"COLUMNS": "300"}).stdout
    for option in ("--kv-disk ", "--kv-store ", "--cors-origin ", "--no-page", "--kv-page-size"):
        assert option in shown
    for option in ("--roles", "--hosts", "--on ", "--kv-store-options", "--supervision"):
        assert option not in shown, "no word can say a table, and some are too long"
    twice = CliRunner().invoke(command_line.app, ["up", "--dry-run", "--model", "echo", "--port", "1", "--port", "2"])
    assert '"port":2' in twice.stdout
