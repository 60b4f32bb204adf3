"""Which chat template a model's directory has, by the precedence of transformers 5. Used by `directory.py`."""

import os
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from nodes.model_spec.small_files import read_template_file
from nodes.model_spec.token_files import TOKENIZER_CONFIG
from nodes.models.errors import ModelDamaged, ModelUnsupported
from nodes.models.spec import ModelSpec

TEMPLATE_FILE: Final = "chat_template.jinja"
PROCESSOR_TEMPLATE: Final = "chat_template.json"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
_DEFAULT: Final = "default"
_MOST_TEMPLATES: Final = 64
"""Models have up to three; each is a file of up to 1 MiB that is read."""


class TemplateFound(NamedTuple):
    """`source` is None if there is none, or if there are several and none is the default: then they are in `named`."""

    source: str | None
    said_by: str = ""
    named: tuple[str, ...] = ()


def require_template(spec: ModelSpec) -> None:
    """Raise ModelUnsupported for a model with several chat templates and no default; one without any is served."""
    if spec.named_templates:
        raise ModelUnsupported(
            f"{spec.path} has the chat templates {', '.join(sorted(spec.named_templates))}, and none is called"
            " `default`: which of them chats are meant for, nobody says. Give the file of one with --chat-template."
        )


def find_template(directory: Path, config: dict[str, Any], processor: dict[str, Any]) -> TemplateFound:
    """The default template: of its own files if there are any, else of tokenizer_config.json, else of
    chat_template.json; the last two as objects. Raises ModelDamaged.
    """
    files = {path.stem: path for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))[:_MOST_TEMPLATES]}
    if os.path.lexists(directory / TEMPLATE_FILE):
        files.setdefault(_DEFAULT, directory / TEMPLATE_FILE)
    if default := files.get(_DEFAULT):
        return TemplateFound(read_template_file(default), default.relative_to(directory).as_posix())
    if files:
        # What the config says does not count beside files, not even as the default that is missing.
        return TemplateFound(None, TEMPLATE_FOLDER, tuple(files))
    # Models of text and images had a file of their own for it before there was chat_template.jinja.
    file = TOKENIZER_CONFIG if config.get("chat_template") else PROCESSOR_TEMPLATE
    value: Any = config.get("chat_template") or processor.get("chat_template")
    if not value:
        return TemplateFound(None)
    if isinstance(value, str):
        return TemplateFound(value, file)
    templates = _by_name(value)
    if _DEFAULT in templates:
        return TemplateFound(templates[_DEFAULT], file)
    return TemplateFound(None, file, tuple(templates))


def _by_name(value: Any) -> dict[str, str]:
    """Named templates: a list of objects with `name` and `template`, or one object."""
    try:
        listed = cast("list[Any]", value) if isinstance(value, list) else []
        named: dict[Any, Any] = {entry["name"]: entry["template"] for entry in listed} or dict(cast("Any", value))
    except (TypeError, KeyError, ValueError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ModelDamaged(
            f"{TOKENIZER_CONFIG}: chat_template is neither a string nor a list of named templates. Download it again,"
            " or give another with --chat-template."
        )
    return cast("dict[str, str]", named)
