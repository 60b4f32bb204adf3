"""`meshctl config`: the settings in force, their JSON Schema, and a check of a file."""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from cli.commands.up import plan
from cli.exit_codes import ExitCode
from cli.output import print_json
from cli.settings import Settings, load_settings
from cli.topology import CONFIG_TYPES


def show(file: Path | None) -> ExitCode:
    """Print the settings as JSON, defaults filled in. Raises BadConfig."""
    print_json(load_settings(file, os.environ, {}))
    return ExitCode.OK


def validate(file: Path) -> ExitCode:
    """Check a file as far as `up` would before it starts anything. Raises BadConfig, BadModel, NoMemory."""
    topology = plan(load_settings(file, os.environ, {}))
    pools = topology.pool_bytes / (1 << 20)
    sys.stderr.write(f"{file} is fine: {len(topology.actors)} actors, KV pools of {pools:.1f} MiB\n")
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
