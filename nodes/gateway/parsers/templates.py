"""Which parsers fit a model, by marks in its chat template."""

import re
from typing import Final, NamedTuple

# What follows the mark in the template's own example or in a call that it renders: others' calls have the same mark.
_XML: Final = re.compile(r"<tool_call>(?:\\n|\s)*<function=")
_OBJECT: Final = re.compile(
    r"""<tool_call>(?:\\n|[\s"'~+])*\{\\?["']|json object with function name and arguments within <tool_call>"""
)


class ParserNames(NamedTuple):
    """Names as in vLLM's flags `--tool-call-parser` and `--reasoning-parser`; None: none."""

    calls: str | None = None
    reasoning: str | None = None


def parser_of_template(chat_template: str) -> ParserNames:
    """The parsers of the forms that a template renders; none for marks that no built-in parser reads."""
    return ParserNames(_calls(chat_template), _reasoning(chat_template))


def _calls(template: str) -> str | None:
    if "<|channel|>" in template and "<|start|>" in template:
        return "openai"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if _XML.search(template):
        return "qwen3_coder"
    if _OBJECT.search(template):
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3_json"
    return None


def _reasoning(template: str) -> str | None:
    if "<|channel|>" in template and "<|start|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    if "<｜Assistant｜>" in template:
        return "deepseek_r1" if "```json" in template else "deepseek_v3"
    return "qwen3"
