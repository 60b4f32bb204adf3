"""What a client asked for, in llguidance's own form; and the check that a tokenizer makes of it before it travels.

The check compiles it for a vocabulary of bytes, where time and memory are bounded from outside: the library's limits do
not hold for everything (a `multipleOf` of seven digits compiles for minutes). Imports llguidance inside of functions.
"""

import json
import random
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from nodes.asks.ask import InvalidAsk, UnsupportedSchema
from nodes.asks.grammar_fields import Kind
from nodes.asks.schema_annotations import without_annotations
from nodes.bundled.byte_tokenizer import EOS_TOKEN, SPECIAL_TOKEN_IDS, byte_tokenizer_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILE_S: Final = 0.25
"""Of a core, with the masks that are tried: a worker's step waits for it once. An object of 300 optional properties
takes 15 ms, schemas of a page 1 to 5 ms."""
_STEP_FUEL: Final = 70_000
"""llguidance burns 14,000 a ms: masks of more than 5 ms would slow down every row of a batch."""
_STEP_ITEMS: Final = 50_000
"""Of its parser, at 20,000 a ms."""
_MAX_SYMBOLS: Final = 100_000
"""Five times what 1,000 optional properties would take."""
_MAX_STATES: Final = 50_000
"""Of a lexer, at 1 to 2 kB: 100 MB, and a worker keeps several grammars."""
_STEPS_TRIED: Final = 32
"""Bytes, with a mask each: 1 ms for the schemas of a page."""
_SHOWN_CHARS: Final = 300
"""Errors quote the grammar."""
_UNSUPPORTED: Final = ("Unimplemented keys", "Unknown format")
_PLACES: Final = re.compile(r"(\n\s*while processing|:) json-schema:///\S*")
"""Of the library's own copy of a schema, which no client has seen."""
_EMPTY: Final = re.compile(r"Regex is empty:.*", re.DOTALL)
_BAD_REGEX: Final = re.compile(r"regex parse error:\n\s*(.*?)\n[\s^]*\nerror: (.*)", re.DOTALL)
_IS_LARK: Final = re.compile(r"^\s*(?:%llguidance\b|[?!]*start\s*:)", re.MULTILINE)
"""Not as the library tells them apart: to it `?start: x` is GBNF, which vLLM's documents show as Lark."""
_ONE_SPACE: Final = "[ ]?"
"""Where JSON allows any whitespace, models draw it without end if they may."""


def limits() -> "LLParserLimits":
    """What one grammar may cost, by its compiler's own count."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_grammar_size=_MAX_SYMBOLS,
        max_lexer_states=_MAX_STATES,
        # They would quote what the client's schema says in logs.
        verbose_errors=False,
    )


def grammar_of(
    kind: Kind, text: str, is_special: Callable[[str], bool], *, strict: bool = False, after: str = ""
) -> str:
    """What llguidance compiles. `is_special`: whether a text is one special token of the model. `after`: Lark of what
    comes before, in which `@answer` stands for the text.

    Raises ValueError if the text is not of its kind, as far as that shows without compiling it.
    """
    alone = _grammar_of(kind, text, is_special, strict=strict)
    if not after:
        return alone
    # Lark is a grammar as it is, all others come as a document with one.
    answer = json.loads(alone)["grammars"][0] if kind in ("json", "regex") else {"lark_grammar": alone}
    return json.dumps({"grammars": [{"name": "before", "lark_grammar": after}, {**answer, "name": "answer"}]})


def _grammar_of(kind: Kind, text: str, is_special: Callable[[str], bool], *, strict: bool) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(json.dumps(described(json.loads(text), strict=strict)))
        case "regex":
            return LLMatcher.grammar_from_regex(_unanchored(text))
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(text if _IS_LARK.search(text) else gbnf_to_lark(text))
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            # Its own error has no base but Exception, and wrong texts make it raise others as well.
            except Exception as error:
                raise ValueError(f"{type(error).__name__}: {error}") from error
        case "tags":
            return LLMatcher.grammar_from_lark(_with_tags(json.loads(text), is_special))


def described(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A schema as llguidance compiles it: with how JSON is written, and whether what cannot be enforced is refused."""
    # Pydantic writes unions as anyOf or, with discriminators, as oneOf, which could not be enforced otherwise.
    flexible = {"whitespace_flexible": True, "whitespace_pattern": _ONE_SPACE, "coerce_one_of": True}
    options = {**flexible, "item_separator": ",", "key_separator": ":", "lenient": not strict}
    # Zod writes a pattern with look-ahead for each address of mail, beside its format.
    kept = schema if strict else without_annotations(schema, with_all_patterns=False)
    return {**kept, "x-guidance": options}


def _unanchored(regex: str) -> str:
    """All of the output is matched anyway, and llguidance takes no anchors."""
    regex = regex.removeprefix("^")
    if regex.endswith("$") and (len(regex) - 1 - len(regex[:-1].rstrip("\\"))) % 2 == 0:
        regex = regex[:-1]
    return regex


def _with_tags(tags: dict[str, Any], is_special: Callable[[str], bool]) -> str:
    """Lark for free text in which a trigger begins one of the structures, as llguidance's `StructTag` writes it."""
    structures, triggers = tags["structures"], tags["triggers"]
    rules: list[str] = []
    for number, (begin, schema, end) in enumerate(structures):
        trigger = next(one for one in triggers if begin.startswith(one))
        body = json.dumps(described(schema, strict=False))
        rest = " ".join([*_quoted(begin[len(trigger) :]), "%json", body, *_quoted(end)])
        if is_special(trigger):
            rules.append(f"tag_{number}: TAG_TEXT {trigger} {rest}")
        else:
            rules.append(f"tag_{number}_trigger[lazy]: TAG_TEXT {json.dumps(trigger)}")
            rules.append(f"tag_{number}: tag_{number}_trigger {rest}")
    either = " | ".join(f"tag_{number}" for number in range(len(structures)))
    head = ["%llguidance {}", f"start: ({either})* tag_end", "tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/"]
    return "\n".join([*head, *rules])


def _quoted(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def check_grammar(kind: Kind, text: str, param: str, *, strict: bool) -> list[str]:
    """Raise InvalidAsk if no worker could serve it. Returns what of it cannot be enforced, in words.

    To be called where it may run out of time and memory.
    """
    from llguidance import LLMatcher

    try:
        grammar = grammar_of(kind, text, lambda _: False, strict=strict)
    except (ValueError, RecursionError) as error:
        raise InvalidAsk(f"'{param}' cannot be compiled: {str(error)[:_SHOWN_CHARS]}.", param) from None
    began = time.process_time()
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if is_wrong:
        raise _refused(notes[0], param, strict=strict)
    # Names of special tokens mean something in the model's vocabulary only.
    if not any("special_token" in note for note in notes):
        matcher = LLMatcher(_bytes_tokenizer(), grammar, limits=limits(), log_level=0)
        _walk(matcher)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param, strict=strict)
    if (taken_s := time.process_time() - began) > MAX_COMPILE_S:
        what = f"it takes {taken_s:.2f} s to compile, and may take {MAX_COMPILE_S:g}"
        raise InvalidAsk(f"'{param}' is too complex: {what}. Make it simpler.", param)
    if kind == "json" and not strict and _has_other_patterns(json.loads(text)):
        return [*notes, "Patterns that look around, or back at a group"]
    return notes


def _has_other_patterns(schema: Mapping[str, Any]) -> bool:
    return without_annotations(schema) != without_annotations(schema, with_all_patterns=False)


def _walk(matcher: "LLMatcher") -> None:
    """Draw some bytes at random: a parser may meet its limits only after the first."""
    drawn = random.Random(0)
    for _ in range(_STEPS_TRIED):
        if matcher.is_error():
            return
        mask = matcher.compute_bitmask()
        among = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if matcher.is_error() or not among:
            return
        matcher.consume_token(drawn.choice(among))


def _refused(problem: str, param: str, *, strict: bool) -> InvalidAsk:
    problem = _in_words(problem.strip().removesuffix("<non-verbose/>").strip())
    if problem.startswith("NoExtension"):
        return InvalidAsk(f"'{param}' cannot be served: no text matches it.", param)
    shown = problem[:_SHOWN_CHARS]
    if strict and problem.startswith(_UNSUPPORTED):
        advice = "Leave it out, or do without 'strict': it is ignored then"
        return UnsupportedSchema(f"'{param}' cannot be enforced: {shown}. {advice}.", param)
    return InvalidAsk(f"'{param}' cannot be compiled: {shown}.", param)


def _in_words(problem: str) -> str:
    """Without what only the library knows of: its places in a schema, its notation of expressions, its drawings."""
    problem = _EMPTY.sub("no text fits all that is said of it", _PLACES.sub("", problem))
    if found := _BAD_REGEX.fullmatch(problem):
        return f"the regular expression {found[1]!r}: {found[2]}"
    return problem


@cache
def _bytes_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer

    return LLTokenizer(byte_tokenizer_json(), eos_token=SPECIAL_TOKEN_IDS[EOS_TOKEN], slices=[])
