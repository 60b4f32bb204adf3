"""`meshctl models`: what `--model` takes without fetching anything, besides directories; `models show`: what a mesh
would make of one of them.
"""

import math
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, cast

from cli.errors import WrongUsage
from cli.exit_codes import ExitCode
from cli.hub.files import cached_models
from cli.output import print_json, print_table, printable
from cli.plan.model import ModelPlan, plan_model
from cli.plan.sources import load_settings
from cli.supervisor.told.progress import Progress
from nodes.model_spec import ModelError, ModelSpec, describe_model, known_models
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


def show(model: str, template: str, pooling: str, output: str) -> ExitCode:
    """Print what the files of a model say, with the name of the file. Raises BadModel or BadConfig, as `up` does."""
    if not model:
        raise WrongUsage("no model is named", why="its name is empty", do="give a directory, or a name as with --model")
    settings = load_settings(None, {}, {"model": model, "chat_template": template, "pooling": pooling})
    plan = plan_model(settings, Progress(None), fetches=False)
    facts = _shown(plan, template)
    if output == "json":
        print_json(facts)
        return ExitCode.OK
    for name, value in facts.items():
        lines = cast("list[Any]", value) if isinstance(value, list) else [value]
        for label, line in zip(
            chain([name.replace("_", " ")], repeat("")), map(_line, lines or ["none"]), strict=False
        ):
            sys.stdout.write(f"{label:<16}{printable(line)}".rstrip() + "\n")
    return ExitCode.OK


def _shown(plan: ModelPlan, template: str) -> dict[str, Any]:
    spec, said_by = plan.spec, plan.spec.said_by
    most = spec.max_context_length or spec.context_length
    return {
        "model": spec.name,
        "path": spec.path,
        **{name: getattr(spec, name) for name in ("architecture", "context_length")},
        "longest_context": {"tokens": most, "said_by": spec.max_context_reason or ("config.json" if spec.path else "")},
        "end_tokens": [{"id": i, "said_by": said_by.get(f"eos_token_ids.{i}", "")} for i in spec.eos_token_ids],
        "chat_template": {"said_by": template or said_by.get("chat_template", ""), "content": plan.texts.forms},
        "special_tokens": [
            {"name": name, "text": text, "said_by": said_by.get(f"special_tokens.{name}", "")}
            for name, text in spec.special_tokens.items()
        ],
        "vocabulary": {"tokens": plan.texts.vocabulary.num_tokens, "embeddings": spec.vocab_size},
        "dtype": {"stored": spec.dtype, "computed": spec.compute_dtype(plan.settings.dtype)},
        "size": {
            "parameters": 0 if spec.source == "echo" else _num_parameters(spec),
            "bytes": sum(Path(file).stat().st_size for file in spec.weight_files),
        },
        **_vectors(spec),
        "notes": list(plan.notes),
    }


def _vectors(spec: ModelSpec) -> dict[str, Any]:
    pooling = spec.pooling
    if pooling is None:
        return {"vectors": []}
    made: dict[str, Any] = {"content": pooling.kind, "pool": pooling.pool}
    made |= {"dimensions": pooling.num_dimensions(spec.hidden_size), "normalized": pooling.normalize}
    made |= {"activation": pooling.activation, "longest_input": pooling.max_length or spec.context_length}
    default = pooling.default_prompt
    prompts = [
        {"name": name, "content": repr(text), "default": name == default}
        for name, text in pooling.prompts.items()
        if text
    ]
    lists = {"labels": list(pooling.labels), "prompts": prompts}
    return {"vectors": made, **{name: found for name, found in lists.items() if found}, "makes_text": spec.has_head}


def _line(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, dict):
        return f"{value:,}" if isinstance(value, int) else str(value)
    fields = dict(cast("dict[str, Any]", value))
    source = fields.pop("said_by", "")
    # What is the thing itself needs no word before it.
    parts = [str(fields.pop(name)) for name in ("id", "name", "text") if name in fields]
    parts += [_line(fields.pop("content"))] if "content" in fields else []
    parts += [f"{name} {_line(field)}" for name, field in fields.items()]
    return (", ".join(parts) or "none") + (f" ({source})" if source else "")


def _entry(name: str, model: str, note: str = "") -> dict[str, object]:
    try:
        spec = describe_model(model)
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
