"""Settings from their sources: a TOML topology file, overlaid by KVMESH_* variables, overlaid by options.

Pure but for reading the file. Precedence, last one wins: defaults, file, environment, options. Each value is checked by
itself, so that what is wrong with it is said with the name of its source; then what has to hold for all together.
"""

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from cli.errors import BadConfig
from cli.plan.declared import ENVIRONMENT_PREFIX, settings_in
from cli.plan.faults import Fault, find_fault, unknown_name
from cli.plan.hosts import check_hosts, hosts_fault
from cli.plan.role_configs import CONFIG_TYPES, typed_roles
from cli.plan.settings import DiskSettings, KVSettings, Settings
from mesh.errors import BadSetting
from mesh.runtime.telemetry import LogSettings

API_KEYS_VARIABLE: Final = "KVMESH_API_KEYS"
API_KEY_VARIABLE: Final = "KVMESH_API_KEY"
_OTHER_VARIABLES: Final = frozenset(
    {
        "KVMESH_TOPOLOGY", "KVMESH_LOG_LEVEL", "KVMESH_LOG_FORMAT", "KVMESH_NCCL_LIBRARY", API_KEYS_VARIABLE,
        API_KEY_VARIABLE,
    }
)  # fmt: skip
"""Documented variables that are not settings of a mesh."""
_HOST_VARIABLE: Final = "KVMESH_HOST"


def load_settings(
    file: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
) -> Settings:
    """Overlay all sources and check them. Options that are None count as not given. Raises BadConfig.

    `told` is what the mesh's registry says, instead of a file.
    """
    settings, own, given = overlay_settings(file, environment, options, told)
    if not settings.hosts:
        return settings
    check_hosts(settings.hosts, own, given)
    return _on_host(settings, own)


def overlay_settings(
    file: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
) -> tuple[Settings, str, Collection[str]]:
    """The same for any host: the settings, the name given for this host, and what was set. Raises BadConfig."""
    _check_log_variables(environment)
    document: dict[str, Any] = _read_file(file) if file is not None else dict(told or {})
    _require(document, str(file) if file is not None else "what the registry sent", strict=True)
    given = {key: value for key, value in options.items() if value is not None}
    own, has_hosts = "", bool(document.get("hosts"))
    if has_hosts:
        # With hosts, `--host` says which of them this is, and only the file says where gateways listen.
        own = str(given.pop("host", None) or environment.get(_HOST_VARIABLE, ""))
    for name, path in _variables(environment).items():
        if not _is_setting(path) or (has_hosts and name == _HOST_VARIABLE):
            continue
        source = f"the environment variable {name}"
        if environment[name].startswith("tcp://"):
            # A pod beside a service named kvmesh has KVMESH_PORT=tcp://10.0.0.1:8000 and others like it.
            source += " (Kubernetes sets it for a service of that name unless enableServiceLinks: false)"
        _put(document, path, environment[name], source)
    names = {setting.key: setting.option for setting in settings_in(Settings)}
    for key, value in given.items():
        _put(document, key.split("__"), value, names.get(key) or f"--{key.replace('_', '-')}")
    settings = msgspec.convert(document, Settings, strict=False)
    settings = msgspec.structs.replace(settings, roles=typed_roles(settings.roles))
    _check_disk(settings.kv.disk)
    _check_store(settings.kv)
    if settings.kv.memory is not None and settings.kv.pages is not None:
        raise BadConfig(
            "the size of KV pools is given twice",
            why=f"--kv-pages ([kv] pages) is {settings.kv.pages}, --kv-memory ([kv] memory) is {settings.kv.memory}",
            do="remove one of them",
        )
    return settings, own, document.keys()


def _check_disk(disk: DiskSettings) -> None:
    if bool(disk.directory) == bool(disk.size_bytes):
        return
    if disk.directory:
        what, why = "--kv-disk has no size", "all of it is reserved at the start, so that the disk is not full later"
        raise BadConfig(what, why=why, do="say how much the pages may take there, like --kv-disk-size 20GiB")
    raise BadConfig(
        "--kv-disk-size says how large, but not where",
        why="no directory is named ([kv.disk] directory)",
        do="name one on a local disk with --kv-disk, or leave the size out",
    )


def _check_store(kv: KVSettings) -> None:
    store = kv.store
    if store.name and kv.disk.directory:
        raise BadConfig(
            "--kv-disk and --kv-store are both given",
            why=f"pages are kept in one place, in {kv.disk.directory} or by the store {store.name}",
            do="leave one of them out ([kv.disk] directory, [kv.store] name)",
        )
    if (store.options or store.key_file) and not store.name:
        raise BadConfig(
            f"[kv.store] has {'options' if store.options else 'a key_file'}, but no name",
            why="no store is named that they could be for",
            do="name an installed one with --kv-store, or leave them out",
        )


def _on_host(settings: Settings, own: str) -> Settings:
    """The settings as one host has them. Every host's device is filled in, and `device` becomes this host's."""
    devices = {name: host.device or settings.device for name, host in settings.hosts.items()}
    hosts = {name: msgspec.structs.replace(host, device=devices[name]) for name, host in settings.hosts.items()}
    return msgspec.structs.replace(settings, on=own, hosts=hosts, device=hosts[own].device)


def foreign_variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings about variables that look like ours but set nothing: they are somebody else's, or misspelled."""
    found: list[str] = []
    known = [setting.variable for setting in settings_in(Settings) if setting.is_given_by_words]
    for name, path in _variables(environment).items():
        if not _is_setting(path):
            near = difflib.get_close_matches(name, known + sorted(_OTHER_VARIABLES), n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            found.append(f"the environment variable {name} is not read: there is no such setting{guess}")
    return found


def _variables(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables that may be settings, in order of their names, and the path of each."""
    names = [name for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIX)]
    return {
        name: name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        for name in names
        if name not in _OTHER_VARIABLES
    }


def _is_setting(path: Sequence[str]) -> bool:
    match path:
        case ["roles", role, field]:
            return role in CONFIG_TYPES and field in CONFIG_TYPES[role].__struct_fields__
        case ["kv", "store", "options", _]:
            # The store alone knows which there are.
            return True
        case _:
            # A table by itself is not one: the environment has strings only.
            return any(list(one.path) == path and one.is_given_by_words for one in settings_in(Settings))


def _check_log_variables(environment: Mapping[str, str]) -> None:
    try:
        LogSettings.from_environment(environment)
    except BadSetting as error:
        raise BadConfig(
            f"the environment variable {error.param} cannot be used", why=error.message, do="correct it, or unset it"
        ) from error


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise BadConfig(
            f"the topology file {file} cannot be read", why=str(error), do="give a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"the topology file {file} is not TOML", why=str(error), do="correct it") from error


def _put(document: dict[str, Any], path: Sequence[str], value: Any, source: str) -> None:
    """Set one value, if it can be one of that setting. Raises BadConfig, naming its source."""
    alone = value
    for key in reversed(path):
        alone = {key: alone}
    _require(alone, source, strict=False)
    for key in path[:-1]:
        # Everything on the way is a table: other paths are not settings, and the file has been checked.
        document = cast("dict[str, Any]", document.setdefault(key, {}))
    document[path[-1]] = value


def _require(document: dict[str, Any], source: str, *, strict: bool) -> None:
    """Raise BadConfig for the first thing in a document that no settings can have; `strict` as in `find_fault`."""
    fault = hosts_fault(document.get("hosts", {}))
    if "on" in document:
        fault = Fault("`on` cannot be set in the file: --host says which host this is", "give --host NAME")
    fault = fault or find_fault(document, Settings, strict=strict)
    for role, fields in () if fault else document.get("roles", {}).items():
        fault = fault or role_fault(role, fields)
    if fault is not None:
        raise BadConfig(
            f"{source} cannot be used", why=fault.why, do=f"{fault.do} (`meshctl config schema` shows what is allowed)"
        )


def role_fault(role: str, fields: Mapping[str, Any]) -> Fault | None:
    if role not in CONFIG_TYPES:
        return unknown_name(role, CONFIG_TYPES, "role")
    # The environment has strings only.
    return find_fault(fields, CONFIG_TYPES[role], f"roles.{role}", strict=False)
