"""`meshctl config`: the settings in force, their JSON Schema, and a check of a file."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from cli.commands.up import plan, settings_in_force, tell_notes
from cli.exit_codes import ExitCode
from cli.launch.progress import Progress
from cli.model_plan import ModelNotHere
from cli.output import print_json
from cli.role_configs import CONFIG_TYPES
from cli.settings import Settings
from nodes.amounts import amount


def show(file: Path | None) -> ExitCode:
    """Print the settings as JSON, defaults filled in. Raises BadConfig."""
    print_json(settings_in_force(file, {}))
    return ExitCode.OK


def validate(file: Path | None) -> ExitCode:
    """Check the settings as far as `up` would before it starts anything. Raises BadConfig, BadModel, NoMemory."""
    what = "the configuration" if file is None else str(file)
    try:
        topology = plan(settings_in_force(file, {}), Progress(2), fetches=False)
    except ModelNotHere as error:
        sys.stderr.write(f"{what} is fine as far as can be said without its model: {error.what}; {error.do}\n")
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
    """JSON Schema of the topology file."""
    roles = list(CONFIG_TYPES.values())
    (reference, *role_references), definitions = msgspec.json.schema_components(
        [Settings, *roles], ref_template="#/$defs/{name}"
    )
    for role_type in roles:
        # An override names some fields; the topology fills in what a role cannot do without.
        definitions[role_type.__name__].pop("required", None)
        definitions[role_type.__name__]["additionalProperties"] = False
    definitions["Settings"]["properties"]["roles"] = {
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
