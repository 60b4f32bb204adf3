"""What the Codex CLI reads of `/v1/models`: the field `models`, beside OpenAI's `data`.

Its catalog is all or nothing: one field that is missing, and it knows no model at all. These are the fields that any of
its versions from 0.80 to 0.153 wants (`ModelInfo` in codex-rs/protocol/src/openai_models.rs, openai/codex); 0.171 takes
them. It asks only a provider whose key comes from a command, or has the answer as a file (`model_catalog_json`).
"""

from typing import Any, Final

_INSTRUCTIONS: Final = (
    "You are a coding agent in the Codex CLI, a program in a terminal of the user's computer, and work in the user's "
    "workspace by calling the tools that you are given. Read files before you change them. Make the smallest change "
    "that does what was asked, check it by running it, and say briefly what you did."
)
"""Takes the place of the prompt that Codex has for OpenAI's models; without it there would be none."""
_MOST_OUTPUT_TOKENS: Final = 10_000
"""Codex's own limit on what a tool's output adds to a conversation."""


_SAME: Final[dict[str, Any]] = {
    "description": None,
    "default_reasoning_level": None,
    "supported_reasoning_levels": [],
    "shell_type": "shell_command",
    "visibility": "list",
    "supported_in_api": True,
    "upgrade": None,
    "base_instructions": _INSTRUCTIONS,
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "default_verbosity": None,
    # Patches come as the text of a custom tool.
    "apply_patch_tool_type": "freeform",
    "supports_parallel_tool_calls": True,
    "experimental_supported_tools": [],
    "input_modalities": ["text"],
}
"""What it is told of every model."""


def codex_model(name: str, priority: int, context_length: int) -> dict[str, Any]:
    """`priority` orders models, the lowest first."""
    # A quarter, or one output would leave no room for the rest of a short context.
    truncation = {"mode": "tokens", "limit": min(_MOST_OUTPUT_TOKENS, context_length // 4)}
    own = {"slug": name, "display_name": name, "priority": priority, "context_window": context_length}
    return {**_SAME, **own, "truncation_policy": truncation}
