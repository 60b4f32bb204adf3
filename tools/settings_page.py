"""Writes `docs/settings.md` from the declarations of settings. `python -m tools.settings_page`.

`tests/tools/test_settings_page.py` fails while the page on disk is another one.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.plan.declared import Setting, settings_in
from cli.plan.hosts import HostSettings
from cli.plan.overrides import PLANNED
from cli.plan.role_configs import CONFIG_TYPES
from cli.plan.settings import Settings
from nodes.amounts import amount

PAGE: Final = Path(__file__).parents[1] / "docs/settings.md"

_HEAD: Final = """\
# Settings

Written by `python -m tools.settings_page` from where each is declared: `cli/plan/settings.py`, and the `config.py` of
each role. `docs/operations.md` says more of those that have a section there.

Each can be set in a TOML file (`--file`, or `KVMESH_TOPOLOGY`), which `KVMESH_*` variables override, which options of
`meshctl up` override; of an option that is given twice the last one counts. `meshctl config show` prints what is in
force and what follows from it, as such a file (`-o json` as JSON), `config schema` the JSON Schema, `config validate`
checks a file and its model without starting anything.

| in the file | variable | option |
|---|---|---|
| `port = 8001` | `KVMESH_PORT=8001` | `--port 8001` |
| `[kv]` with `memory = "1GiB"` | `KVMESH_KV__MEMORY=1GiB` | `--kv-memory 1GiB` |
| `served_name = ["a", "b"]` | `KVMESH_SERVED_NAME=a,b` | `--served-name a --served-name b` |
| `page = false` | `KVMESH_PAGE=false` | `--no-page` |
| `[roles.gateway]` with `max_inflight = 100` | `KVMESH_ROLES__GATEWAY__MAX_INFLIGHT=100` | none |

`KVMESH_LOG_LEVEL` (`debug`, `info`, `warning`, `error`, `critical`) is what actors log, `KVMESH_LOG_FORMAT` (`json`,
`console`) the format of an actor that was started by `meshctl run`, `KVMESH_API_KEYS` and `KVMESH_API_KEY` are
[API keys](operations.md#api-keys). Any other variable that begins with `KVMESH_` causes a warning and is not read.
"""
_ROLES: Final = """\
## Of one role

Fields of a role's own configuration that no other actor depends on: `[roles.ROLE]`, or the table in it that is named
(`[roles.tokenizer.rendering]`); few meshes need any. What ends in `_s` is in seconds.
"""


def page() -> str:
    """All of the page."""
    tables: dict[str, list[Setting]] = {}
    for setting in settings_in(Settings):
        if setting.shown.by_words:
            tables.setdefault(".".join(setting.path[:-1]), []).append(setting)
    parts = [_HEAD]
    for table, settings in tables.items():
        title = f"## `[{table}]`: {_first_words(settings[0].owner)}\n" if table else "## Of the whole mesh\n"
        parts += [title, _of_the_mesh(settings)]
    hosts = settings_in(HostSettings)
    parts += [
        f"## `[hosts.NAME]`: {_first_words(HostSettings)}\n",
        _table(("setting", "default", "what it says"), map(_row, hosts)),
    ]
    parts += [_ROLES, _table(("role", "setting", "default", "what it says"), _of_roles())]
    return "\n".join(parts)


def _of_the_mesh(settings: Iterable[Setting]) -> str:
    rows = ((*_row(one)[:1], f"`{one.option}`" if one.option else "", *_row(one)[1:]) for one in settings)
    return _table(("setting", "option", "default", "what it says"), rows)


def _of_roles() -> Iterator[tuple[str, ...]]:
    for role, kind in CONFIG_TYPES.items():
        for setting in settings_in(kind):
            if setting.says and setting.path[0] not in PLANNED:
                yield role, *_row(setting, ".".join(setting.path))


def _row(setting: Setting, name: str = "") -> tuple[str, str, str]:
    return f"`{name or setting.path[-1]}`", _default(setting), " ".join(setting.says.split()).replace("|", "\\|")


def _default(setting: Setting) -> str:
    value: Any = setting.default
    if value in (None, "", (), msgspec.NODEFAULT):
        return ""
    if setting.path[-1].endswith("_bytes"):
        return amount(value)
    return f"`{msgspec.json.encode(value).decode()}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _first_words(kind: type) -> str:
    words = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return words[0].lower() + words[1:]


if __name__ == "__main__":
    PAGE.write_text(page())
