"""The turns of Anthropic's conversations as messages of a chat. Pure.

A user's turn that begins with results of tools is a message of each result, then one of the rest; turns of one role in
a row are one. Results must follow their calls: what templates make of others differs, and is seldom an error.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from nodes.gateway.errors import invalid
from nodes.gateway.fields.conversation import Turn, call_of
from nodes.gateway.fields.tool_types import SaidCall
from nodes.gateway.surfaces.messages.types import (
    Block,
    DocumentBlock,
    MessageParam,
    RedactedThinkingBlock,
    ResultPart,
    SearchResultBlock,
    TextBlock,
    TextPart,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

_ATTRIBUTION: Final = re.compile(r"^x-anthropic-billing-header:.*(?:\n|$)", re.MULTILINE)
"""Claude Code's first line of system, with a number that is another one in each conversation, of its older versions in
each request: nothing after it could be read from a cache. It says nothing to the model."""

BLOCKS_OF: Final[dict[str, tuple[type[Struct], ...]]] = {
    "system": (TextBlock,),
    "user": (TextBlock, DocumentBlock, SearchResultBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}
"""By role, what its turns may hold."""

NOTHING_LOADED: Final[Mapping[str, str]] = {}


def system_text(system: str | Sequence[TextBlock | TextPart] | None) -> str:
    """Instructions as one text, a line or more for each block that has any, without `_ATTRIBUTION`."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n".join(rest for text in texts if (rest := _ATTRIBUTION.sub("", text)))


def turns_of(
    system: str | Sequence[TextPart] | None,
    messages: Sequence[MessageParam],
    *,
    loaded: Mapping[str, str],
) -> list[Turn]:
    """Raises BadRequest, naming the block. `loaded`: by names of tools, what a result that refers to one says."""
    turns = _Turns(loaded)
    turns.system(system_text(system))
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        _check_blocks(message, where)
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "user":
                turns.user(blocks, where)
            case "assistant":
                turns.assistant(blocks, where, is_last=number == len(messages) - 1)
            case "system":
                texts = [block for block in blocks if isinstance(block, TextBlock)]
                turns.system(system_text(texts))
    return turns.ended()


class _Turns:
    """The turns so far, and the calls of the last one that have no result yet, by id."""

    def __init__(self, loaded: Mapping[str, str]) -> None:
        self._loaded = loaded
        self._turns: list[Turn] = []
        self._open: dict[str, str] = {}
        self._called_at = ""
        self._known: set[str] = set()
        self._has_user = False

    def system(self, text: str) -> None:
        if text:
            self._append(Turn(role="system", content=text))

    def user(self, blocks: Sequence[Block], where: str) -> None:
        self._has_user = True
        results = [(number, block) for number, block in enumerate(blocks) if isinstance(block, ToolResultBlock)]
        for number, block in results:
            self._result(block, f"{where}.content.{number}")
        text = "\n".join(text for block in blocks if (text := _shown(block)))
        if text:
            self._check_answered()
            self._append(Turn(role="user", content=text))
        elif not results:
            raise invalid(f"'{where}.content' is empty: a user's turn needs text or results of tools.", where)

    def assistant(self, blocks: Sequence[Block], where: str, *, is_last: bool) -> None:
        if not self._has_user:
            param = f"{where}.role"
            raise invalid(f"'{param}' is assistant, but a conversation begins with a user's turn.", param)
        self._check_answered()
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking)
        calls = [
            self._call(block, f"{where}.content.{number}")
            for number, block in enumerate(blocks)
            if isinstance(block, ToolUseBlock)
        ]
        if calls:
            self._called_at = where
        # A last turn of nothing is not there to be continued: the answer begins.
        if text or reasoning or calls or not is_last:
            turn = Turn(role="assistant", content=text, reasoning_content=reasoning or None, tool_calls=calls or None)
            self._append(turn)

    def ended(self) -> list[Turn]:
        self._check_answered()
        if not self._has_user:
            raise invalid("'messages' has no turn of the user.", "messages")
        return self._turns

    def _append(self, turn: Turn) -> None:
        last = self._turns[-1] if self._turns else None
        if last is None or last.role != turn.role or last.tool_calls:
            self._turns.append(turn)
            return
        last.content = "\n".join(text for text in (last.content, turn.content) if isinstance(text, str) and text)
        last.reasoning_content = turn.reasoning_content or last.reasoning_content
        last.tool_calls = turn.tool_calls

    def _call(self, block: ToolUseBlock, where: str) -> SaidCall:
        if block.id in self._known:
            raise invalid(f"'{where}.id' is {block.id[:100]!r}, as of an earlier call.", f"{where}.id")
        self._known.add(block.id)
        self._open[block.id] = block.name
        return call_of(block.id, block.name, msgspec.json.encode(block.input).decode())

    def _result(self, block: ToolResultBlock, where: str) -> None:
        name = self._open.pop(block.tool_use_id, None)
        if name is None:
            param = f"{where}.tool_use_id"
            problem = f"'{param}' is {block.tool_use_id[:100]!r}: no call in the turn before has this id and no result."
            raise invalid(problem, param)
        text = _result_text(block, self._loaded)
        self._turns.append(Turn(role="tool", tool_call_id=block.tool_use_id, name=name, content=text))

    def _check_answered(self) -> None:
        if self._open:
            missing = ", ".join(repr(one[:100]) for one in [*self._open][:5])
            problem = (
                f"'{self._called_at}' has calls without a result: {missing}."
                " The turn after it must begin with a tool_result for each tool_use."
            )
            raise invalid(problem, self._called_at)


def _check_blocks(turn: MessageParam, where: str) -> None:
    if isinstance(turn.content, str):
        return
    for number, block in enumerate(turn.content):
        if not isinstance(block, BLOCKS_OF[turn.role]):
            param = f"{where}.content.{number}.type"
            kind = block.__struct_config__.tag
            raise invalid(f"'{param}' is {kind}, which a turn of the role {turn.role} cannot have.", param)


def _shown(block: Block | ResultPart, loaded: Mapping[str, str] = NOTHING_LOADED) -> str:
    """Text of a block that is for the model to read; empty if it has none."""
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            source = block.source
            body = source.data if isinstance(source, TextSource) else source.content
            texts = [body] if isinstance(body, str) else [part.text for part in body]
            return "\n".join(text for text in (block.title, block.context, *texts) if text)
        case SearchResultBlock():
            return "\n".join(
                text for text in (block.title, block.source, *(part.text for part in block.content)) if text
            )
        case ToolReferenceBlock():
            return loaded.get(block.tool_name, block.tool_name)
        case _:
            return ""


def _result_text(block: ToolResultBlock, loaded: Mapping[str, str]) -> str:
    content = block.content or ""
    text = (
        content if isinstance(content, str) else "\n".join(shown for part in content if (shown := _shown(part, loaded)))
    )
    # Messages of tools have no field for it, and most failures say so themselves.
    return f"Error: {text}" if block.is_error and "error" not in text[:50].lower() else text
