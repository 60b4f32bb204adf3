"""Fields that change what a prompt is made of: `suffix` of a completion, `documents` and `verbosity` of a chat. Pure.

Whether they can be served follows from the model: from tokens of its vocabulary (`GatewayConfig.fill_in`), from
variables of its chat template (`template_reads`). A field that would change nothing is refused by name.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.openai_types import ChatCompletionBody, CompletionBody
from nodes.protocol import Prepare

_OF_TEMPLATES: Final = ("documents", "verbosity")
NEUTRAL_VERBOSITY: Final = "medium"
"""OpenAI's default: a model that knows no other way to answer has it."""


def with_suffix(
    texts: list[str] | None, body: CompletionBody, *, echo: bool, config: GatewayConfig
) -> list[str] | None:
    """Prompts of text as texts with a gap to fill, if there is a suffix. Raises `BadRequest`."""
    if not body.suffix:
        return texts
    if config.fill_in is None:
        message = "'suffix' is not supported by this model: its vocabulary has no tokens that ask for a middle."
        raise BadRequest(message, param="suffix", code="unsupported_parameter")
    if texts is None:
        message = "'suffix' needs a 'prompt' of text, not of token ids."
        raise BadRequest(message, param="prompt", code="invalid_value")
    if echo:
        message = "'echo' and 'suffix' cannot be used together."
        raise BadRequest(message, param="echo", code="invalid_value")
    return [config.fill_in.text(text, body.suffix) for text in texts]


def with_template_fields(
    prepare: Prepare, body: ChatCompletionBody, fields: Mapping[str, Raw], config: GatewayConfig
) -> Prepare:
    """The question with those fields among the template's variables. Raises `BadRequest`."""
    # An empty list of documents says nothing.
    given = [name for name in _OF_TEMPLATES if getattr(body, name)]
    for name in given:
        if name not in config.template_reads and getattr(body, name) != NEUTRAL_VERBOSITY:
            raise BadRequest(
                f"'{name}' is not read by this model's chat template; one that does can be set with --chat-template.",
                param=name,
                code="unsupported_parameter",
            )
    if not given:
        return prepare
    # A variable that is given by its own name goes before the field.
    named = msgspec.json.decode(prepare.chat_template_kwargs or b"{}", type=dict[str, Raw])
    variables = {name: fields[name] for name in given} | named
    return replace(prepare, chat_template_kwargs=msgspec.json.encode(variables))
