"""The turns of Anthropic's conversations as messages of a chat. Pure.

A user's turn that begins with results of tools is a message of each result, then one of the rest; turns of one role in
a row are one. Results must follow their calls: what templates make of others differs, and is seldom an error.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from nodes.gateway.errors import BadRequest
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

Message = dict[str, Any]

NOTHING_LOADED: Final[Mapping[str, str]] = {}


def system_text(system: str | Sequence[TextBlock | TextPart] | None) -> str:
    """Instructions as one text, a line or more for each block that has any, without `_ATTRIBUTION`."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n".join(rest for text in texts if (rest := _ATTRIBUTION.sub("", text)))


def chat_messages(
    system: str | Sequence[TextPart] | None,
    turns: Sequence[MessageParam],
    *,
    loaded: Mapping[str, str],
) -> tuple[list[Message], list[str]]:
    """Messages, and for each the field that it was made from. Raises BadRequest, naming the block.

    `loaded`: by the names of tools, what a result that refers to one says in its place.
    """
    conversation = _Conversation(loaded)
    conversation.system(system_text(system), "system")
    for number, turn in enumerate(turns):
        where = f"messages.{number}"
        _check_blocks(turn, where)
        blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
        match turn.role:
            case "user":
                conversation.user(blocks, where)
            case "assistant":
                conversation.assistant(blocks, where, is_last=number == len(turns) - 1)
            case "system":
                texts = [block for block in blocks if isinstance(block, TextBlock)]
                conversation.system(system_text(texts), where)
    return conversation.ended()


class _Conversation:
    """The messages so far, and the calls of the last one that have no result yet, by id."""

    def __init__(self, loaded: Mapping[str, str]) -> None:
        self._loaded = loaded
        self._messages: list[Message] = []
        self._origins: list[str] = []
        self._open: dict[str, str] = {}
        self._called_at = ""
        self._known: set[str] = set()
        self._has_user = False

    def system(self, text: str, where: str) -> None:
        if text:
            self._append({"role": "system", "content": text}, where)

    def user(self, blocks: Sequence[Block], where: str) -> None:
        self._has_user = True
        num_results = 0
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                num_results += 1
                self._result(block, f"{where}.content.{number}")
        text = "\n".join(text for block in blocks if (text := _shown(block)))
        if text:
            self._check_answered()
            self._append({"role": "user", "content": text}, where)
        elif not num_results:
            raise _wrong(f"'{where}.content' is empty: a user's turn needs text or results of tools.", where)

    def assistant(self, blocks: Sequence[Block], where: str, *, is_last: bool) -> None:
        if not self._has_user:
            raise _wrong(f"'{where}.role' is assistant, but a conversation begins with a user's turn.", f"{where}.role")
        self._check_answered()
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking)
        calls = [(n, block) for n, block in enumerate(blocks) if isinstance(block, ToolUseBlock)]
        if not (text or reasoning or calls) and is_last:
            # Nothing to continue: the answer begins here.
            return
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._call(block, f"{where}.content.{number}") for number, block in calls]
            self._called_at = where
        self._append(message, where)

    def ended(self) -> tuple[list[Message], list[str]]:
        self._check_answered()
        if not self._has_user:
            raise _wrong("'messages' has no turn of the user.", "messages")
        return self._messages, self._origins

    def _append(self, message: Message, where: str) -> None:
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == message["role"] and "tool_calls" not in last:
            content = "\n".join(text for text in (last["content"], message["content"]) if text)
            self._messages[-1] = {**last, **message, "content": content}
        else:
            self._messages.append(message)
            self._origins.append(where)

    def _call(self, block: ToolUseBlock, where: str) -> Message:
        if block.id in self._known:
            raise _wrong(f"'{where}.id' is {block.id[:100]!r}, as of an earlier call.", f"{where}.id")
        self._known.add(block.id)
        self._open[block.id] = block.name
        function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
        return {"id": block.id, "type": "function", "function": function}

    def _result(self, block: ToolResultBlock, where: str) -> None:
        name = self._open.pop(block.tool_use_id, None)
        if name is None:
            param = f"{where}.tool_use_id"
            problem = f"'{param}' is {block.tool_use_id[:100]!r}: no call in the turn before has this id and no result."
            raise _wrong(problem, param)
        text = _result_text(block, self._loaded)
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})
        self._origins.append(where)

    def _check_answered(self) -> None:
        if self._open:
            missing = ", ".join(repr(one[:100]) for one in [*self._open][:5])
            problem = (
                f"'{self._called_at}' has calls without a result: {missing}."
                " The turn after it must begin with a tool_result for each tool_use."
            )
            raise _wrong(problem, self._called_at)


def _check_blocks(turn: MessageParam, where: str) -> None:
    if isinstance(turn.content, str):
        return
    for number, block in enumerate(turn.content):
        if not isinstance(block, BLOCKS_OF[turn.role]):
            param = f"{where}.content.{number}.type"
            kind = block.__struct_config__.tag
            raise _wrong(f"'{param}' is {kind}, which a turn of the role {turn.role} cannot have.", param)


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


def _wrong(problem: str, param: str) -> BadRequest:
    return BadRequest(problem, param=param, code="invalid_value")
