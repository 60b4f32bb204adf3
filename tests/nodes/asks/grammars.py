"""What the tests of grammars share: the bundled model's tokens, asks from HTTP fields, and a sampler at random."""

import random
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from nodes.asks import AskLimits, DrawnModel, Editor, RowEdits, asked, fields_of, open_asks, read_asks
from nodes.model_spec import resolve_model
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.request import Asked

SPEC = resolve_model("tiny")
MODEL = DrawnModel(SPEC.vocab_size, SPEC.eos_token_ids, SPEC)
PROMPT = [5, 6, 7]


@cache
def tokenizer() -> Any:
    return load_tokenizer(SPEC)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def sent(**given: Any) -> list[Asked]:
    """The asks of a body, as they go over the wire."""
    fields = fields_of("chat")
    body = dict.fromkeys((*fields, "min_tokens", "stop_token_ids", "ignore_eos"))
    body |= {name: msgspec.convert(one, fields[name]) if name in fields else one for name, one in given.items()}
    return asked(read_asks(body, AskLimits(SPEC.vocab_size)))


def schema_of(schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}


def edits_of(editors: tuple[Editor, ...], output: "list[int] | array[int]") -> RowEdits:
    edits = RowEdits()
    for editor in editors:
        editor.edit(array("i", [*PROMPT, *output]), len(output), edits)
    return edits


def allowed(edits: RowEdits, size: int = SPEC.vocab_size) -> list[int]:
    return [token_id for token_id in range(size) if edits.allows(token_id)]


def walk(
    asks: list[Asked], seed: int, most: int = 2000, choose: Callable[[list[int]], list[int]] | None = None
) -> tuple[list[int], bool]:
    """Tokens drawn at random of those allowed, without the end; and whether it came to one."""
    editors, output, drawn = open_asks(asks, MODEL).editors, array("i"), random.Random(seed)
    for _ in range(most):
        among = allowed(edits_of(editors, output))
        assert among
        token_id = drawn.choice(choose(among) if choose else among)
        if token_id in MODEL.end_token_ids:
            return output.tolist(), True
        output.append(token_id)
    return output.tolist(), False


def text_of(output: list[int]) -> str:
    return tokenizer().decode(output, skip_special_tokens=False)
