"""Fields that change what a prompt is made of: `suffix` of a completion, variables of a chat's template. Pure.

Whether they can be served follows from the model: from tokens of its vocabulary (`GatewayConfig.fill_in`), from
variables of its chat template (`template_reads`). A field that would change nothing is refused by name.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import invalid, unsupported
from nodes.gateway.fields.openai_types import ChatOptions, CompletionBody

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
        raise unsupported(message, "suffix")
    if texts is None:
        raise invalid("'suffix' needs a 'prompt' of text, not of token ids.", "prompt")
    if echo:
        raise invalid("'echo' and 'suffix' cannot be used together.", "echo")
    return [config.fill_in.text(text, body.suffix) for text in texts]


def template_variables(options: ChatOptions, fields: Mapping[str, Any], config: GatewayConfig) -> bytes | None:
    """Variables of the chat template that fields stand for, under the names that templates know; those that a client
    gives by their own name go before them. Raises `BadRequest`.
    """
    # An empty list of documents says nothing.
    given = [name for name in _OF_TEMPLATES if getattr(options, name)]
    for name in given:
        if name not in config.template_reads and getattr(options, name) != NEUTRAL_VERBOSITY:
            raise unsupported(
                f"'{name}' is not read by this model's chat template; one that does can be set with --chat-template.",
                name,
            )
    variables: dict[str, Any] = {name: fields[name] for name in given}
    if options.reasoning_effort is not None:
        # Templates know one of two names (Qwen's, DeepSeek's); one that knows neither ignores both.
        thinks = options.reasoning_effort != "none"
        variables |= {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            variables["reasoning_effort"] = options.reasoning_effort
    if options.enable_thinking is not None:
        variables |= {"enable_thinking": options.enable_thinking, "thinking": options.enable_thinking}
    variables |= options.chat_template_kwargs or {}
    return msgspec.json.encode(variables) if variables else None
