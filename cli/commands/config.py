"""`meshctl config`: the settings in force, their JSON Schema, and a check of a file."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from cli.commands.up import plan, settings_in_force, tell_notes
from cli.errors import CliError
from cli.exit_codes import ExitCode
from cli.output import as_toml, print_json
from cli.plan.declared import said_of, settings_in
from cli.plan.hosts import OF_HOSTS, HostSettings
from cli.plan.model import ModelNotHere
from cli.plan.role_configs import CONFIG_TYPES
from cli.plan.settings import Settings
from cli.supervisor.told.progress import Progress
from nodes.amounts import amount
from nodes.scheduler.config import SchedulerConfig


def show(file: Path | None, output: str, host: str | None = None) -> ExitCode:
    """Print the settings as TOML (a topology file) or as JSON. `host` is as for `up`. Raises BadConfig."""
    shown = _filled_in(settings_in_force(file, {"host": host}))
    if output == "json":
        print_json(shown)
    else:
        sys.stdout.write(as_toml(shown))
    return ExitCode.OK


def _filled_in(settings: Settings) -> dict[str, Any]:
    """The settings with what follows from others, and if possible from model and machine. None: not set."""
    shown: dict[str, Any] = msgspec.to_builtins(settings) | {
        "prefill_tp": settings.tp_size("prefill"),
        "decode_tp": settings.tp_size("decode"),
        "chunk": settings.chunk_tokens,
        "max_step_ms": settings.max_step_s * 1e3,
        "cors_origins": list(settings.allowed_origins),
        "trusted_proxies": list(settings.proxies),
    }
    if settings.local_prefill_max is None:
        defaults = {field.name: field.default for field in msgspec.structs.fields(SchedulerConfig)}
        shown["local_prefill_max"] = defaults["local_prefill_max"]
    # Which host this is does not belong in the file.
    del shown["on"]
    if settings.hosts:
        # Nor does what follows from this host's memory and cores: the file is for all hosts.
        return {name: value for name, value in shown.items() if name not in OF_HOSTS}
    shown["prefill"], shown["decode"], shown["mixed"] = settings.groups
    with contextlib.suppress(CliError):
        topology = plan(settings, Progress(None), fetches=False)
        shown["context_length"], shown["threads"] = topology.context.length, topology.num_threads
        sizes = {pool["num_pages"] for launch in topology.actors for pool in launch.config.get("pools", ())}
        if settings.kv.memory is None and len(sizes) == 1:
            shown["kv"]["pages"] = sizes.pop()
        shown["dtype"] = topology.settings.dtype
        shown["served_name"] = list(settings.served_names or (topology.model_name,))
    return shown


def validate(file: Path | None, host: str | None = None) -> ExitCode:
    """Check the settings as far as `up` would on this `host` before it starts anything.

    Raises BadConfig, BadModel, NoMemory.
    """
    what = "the configuration" if file is None else str(file)
    try:
        topology = plan(settings_in_force(file, {"host": host}), Progress(2), fetches=False)
    except ModelNotHere as error:
        sys.stderr.write(f"{what} is fine as far as it can be checked without the model: {error.what}; {error.do}\n")
        return ExitCode.OK
    tell_notes(topology)
    pools = amount(topology.pool_bytes)
    sys.stderr.write(f"{what} is fine: {len(topology.actors)} actors, KV pools of {pools}\n")
    sys.stderr.write(f"{topology.context}\n")
    return ExitCode.OK


def schema() -> ExitCode:
    """Print the JSON Schema of the topology file, with what each role's own table may hold."""
    print_json(topology_schema())
    return ExitCode.OK


def topology_schema() -> dict[str, Any]:
    roles = list(CONFIG_TYPES.values())
    (reference, *role_references), definitions = msgspec.json.schema_components(
        [Settings, *roles], ref_template="#/$defs/{name}"
    )
    for kind in {setting.owner for root in (Settings, HostSettings, *roles) for setting in settings_in(root)}:
        for name, text in said_of(kind).items():
            shown = definitions[kind.__name__]["properties"][name]
            # The words of its type come last, about what it may be.
            shown["description"] = "\n\n".join(filter(None, (text, shown.get("description"))))
    for role_type in roles:
        # An override names some fields; the topology fills in those that a role requires.
        definitions[role_type.__name__].pop("required", None)
        definitions[role_type.__name__]["additionalProperties"] = False
    settings = definitions[Settings.__name__]["properties"]
    # Filled in from --host.
    del settings["on"]
    settings["roles"] = {
        "type": "object",
        "description": "Fields of a role's own configuration, by role.",
        "properties": dict(zip(CONFIG_TYPES, role_references, strict=True)),
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvmesh topology",
        **reference,
        "$defs": definitions,
    }
