"""Whatever can be set is set by product code, or a page names it: a setting that nobody can find is a constant.

`docs/settings.md` is what the declarations say, `docs/operations.md` names options of actors of one's own.
"""

import ast
import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from cli.plan import declared
from cli.plan.role_configs import CONFIG_TYPES
from cli.plan.settings import Settings
from mesh.options import SystemOptions
from mesh.transport.zeromq_binding import ZeroMQOptions
from tools import settings_page

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / page).read_text() for page in ("operations.md", "watching.md", "settings.md"))
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`\n]+`", PAGE, re.DOTALL))))
SOURCES = [path for package in ("mesh", "kvstore", "nodes", "cli") for path in (ROOT / package).rglob("*.py")]


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of a configuration's fields, by name; empty for what is none."""
    is_one = isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    )
    return typing.get_type_hints(kind) if is_one else {}


def kind_made_by(call: ast.Call) -> str:
    """The struct that a call makes: `configured(GatewayConfig, ...)` makes one of its first argument."""
    made = ast.unparse(call.func).split(".")[-1]
    return ast.unparse(call.args[0]) if made == "configured" and call.args else made


def settings_in(kind: Any, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Class and name of every field of a configuration, with those of tables in it."""
    for name, inner in fields_of(kind).items():
        # A table in a configuration has a default of its own kind, unlike an address, say.
        if isinstance(inner, type) and inner.__name__.endswith(("Settings", "Limits", "Options")):
            settings_in(inner, found)
        found.add((kind.__name__, name))
    return found


def test_every_setting_is_set_or_on_the_page() -> None:
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given = {(kind_made_by(call), keyword.arg) for call in calls for keyword in call.keywords}
    found: set[tuple[str, str]] = set()
    for kind in (*CONFIG_TYPES.values(), Settings, SystemOptions, ZeroMQOptions):
        settings_in(kind, found)
    assert len(found) > 150, "the scan no longer finds them"
    lost = [
        f"{kind}.{name}" for kind, name in found if name not in NAMED and not {(kind, name), ("replace", name)} & given
    ]
    assert not sorted(lost), "say below it what it is for, or make it a constant beside the code that uses it"


def test_the_page_is_what_the_declarations_say() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python -m tools.settings_page"
    lost = [".".join(one.path) for one in declared.settings_in(Settings) if not one.says]
    assert not lost, "say below it what it is for"
