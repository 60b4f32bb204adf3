"""`meshctl models`: what `--model` takes without fetching anything, besides directories."""

import math
from typing import Final

from cli.exit_codes import ExitCode
from cli.hub.files import cached_models
from cli.output import print_json, print_table
from nodes.model_spec import ModelError, ModelSpec, known_models, resolve_model
from nodes.model_spec.weight_index import expected_shapes

_SHAPE: Final = ("architecture", "num_layers", "hidden_size", "context_length", "dtype")


def models(output: str) -> ExitCode:
    """Print name, shape and size of each; models of the hub if they are in its cache."""
    entries = [_entry(name, name) for name in known_models()]
    entries += [_entry(name, str(path), "in the hub's cache") for name, path in cached_models()]
    if output == "json":
        print_json(entries)
        return ExitCode.OK
    header = ["MODEL", "ARCHITECTURE", "LAYERS", "HIDDEN", "CONTEXT", "DTYPE", "PARAMETERS", "NOTE"]
    print_table(header, [[str(value) for value in entry.values()] for entry in entries])
    return ExitCode.OK


def _entry(name: str, model: str, note: str = "") -> dict[str, object]:
    try:
        spec = resolve_model(model)
    except ModelError as error:
        return {"model": name, **dict.fromkeys((*_SHAPE, "num_parameters"), ""), "note": error.message}
    return {
        "model": name,
        **{name: getattr(spec, name) for name in _SHAPE},
        "num_parameters": 0 if spec.source == "echo" else _num_parameters(spec),
        "note": note or {"echo": "answers with its prompt", "random": "random weights"}.get(spec.source, "bundled toy"),
    }


def _num_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(spec).values())
