"""Keeps outputs within a grammar at a worker: which tokens may come next, after those that there are.

A matcher is a cache of a pure function of the output: before a draw it takes in the tokens that it lacks, and it begins
again if the output is not what it has seen. Nothing is taken in by drawing, so nothing needs to survive a death.
Compiled grammars are kept for the process. Imports llguidance and tokenizers inside of functions.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

from nodes.asks.ask import DrawnModel
from nodes.asks.edits import EditFailed, Editor, RowEdits, mask_of
from nodes.asks.grammar_fields import Kind
from nodes.asks.grammar_text import grammar_of, limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED: Final = 64
"""Grammars of a process: agents send the same few again and again, and one takes up to some MB."""
_MAX_WAIT_S: Final = 5.0
"""A step waits with its row: tokenizers refuse what takes a core 0.25 s to compile, and the core may be a busy one."""
_MAX_EDIT_S: Final = 0.05
"""Of a core, while all rows of the step wait: ten times what the library's limits let a mask take. They do not bound
what a token costs an ambiguous grammar (`start: start start | "a" | ""`), which grows with each."""
_MAX_TOKEN_S: Final = 0.0002
"""More for each token that is taken in, as all of an answer are after a death: fifty times what one takes."""
_AT_ONCE: Final = 32
"""Tokens between two looks at the time."""
_SHOWN_CHARS: Final = 300
"""A sentence of the library; longer ones quote the grammar."""


_Key = tuple[str, str, int, tuple[int, ...]]
"""What a vocabulary depends on: the model's folder and name, the width of its logits, the ends."""


class GrammarFailed(EditFailed, code="grammar_failed"):
    """A grammar cannot be followed: it does not compile, is too complex for a draw, or leaves no token."""


class Vocabulary(NamedTuple):
    """A model's tokens as llguidance sees them. `only_ends`: the mask that allows nothing but the end of an answer."""

    tokenizer: "LLTokenizer"
    size: int
    ends: frozenset[int]
    only_ends: bytes


# Both tables are used by the thread that runs steps and by the one that compiles; held for a look-up, or for the second
# that a vocabulary takes, without which nobody could go on.
_lock: Final = Lock()
_vocabularies: Final[dict[_Key, Vocabulary]] = {}
_compiled: Final[OrderedDict[tuple[_Key, Kind, str, str], "Future[LLMatcher]"]] = OrderedDict()


def vocabulary_of(model: DrawnModel) -> Vocabulary:
    """The vocabulary, loaded once in a process: 1.2 s for 152,000 tokens, and 160 MB.

    Raises ModelError if the model has no tokenizer or no end, and what the libraries raise for what they cannot read.
    """
    from llguidance import LLTokenizer

    from nodes.model_spec.vocabulary import load_tokenizer
    from nodes.models.errors import ModelUnsupported

    spec, key = model.spec, _key(model)
    if spec is None or not (ends := key[-1]):
        raise ModelUnsupported("a grammar needs the model's tokenizer, and a token that ends an answer")
    with _lock:
        found = _vocabularies.get(key)
        if found is None:
            tokenizer = load_tokenizer(spec)
            # By default the library takes one end, by its name, and has no ids beyond those of the tokenizer.
            size = max(model.vocab_size, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1)
            read = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(ends))
            found = Vocabulary(read, model.vocab_size, frozenset(ends), mask_of(ends, model.vocab_size))
            _vocabularies[key] = found
    return found


def _key(model: DrawnModel) -> _Key:
    path, name = (model.spec.path, model.spec.name) if model.spec is not None else ("", "")
    return path, name, model.vocab_size, tuple(one for one in model.end_token_ids if 0 <= one < model.vocab_size)


def editor_of(kind: Kind, text: str, model: DrawnModel, *, goes_on: bool, after: str = "") -> Editor:
    """An editor for one sequence; its grammar is being compiled, or is already. `goes_on`: as long as it may; `after`
    as in `grammar_of`.
    """
    return _Within(_compile(kind, text, after, model), model, goes_on=goes_on)


@cache
def _pool() -> ThreadPoolExecutor:
    # One thread: what is compiled there must not take the cores of the steps. Made when needed, as roles are forked.
    return ThreadPoolExecutor(1, thread_name_prefix="grammar")


def _compile(kind: Kind, text: str, after: str, model: DrawnModel) -> "Future[LLMatcher]":
    key = (_key(model), kind, text, after)
    with _lock:
        found = _compiled.pop(key, None)
        # One that failed is tried again: what it failed of may have been a lack of memory.
        if found is None or (found.done() and found.exception() is not None):
            found = _pool().submit(_matcher, kind, text, after, model)
        _compiled[key] = found
        if len(_compiled) > _MAX_COMPILED:
            _compiled.popitem(last=False)
    return found


def _matcher(kind: Kind, text: str, after: str, model: DrawnModel) -> "LLMatcher":
    from llguidance import LLMatcher

    tokenizer = vocabulary_of(model).tokenizer

    def is_special(name: str) -> bool:
        ids = tokenizer.tokenize_str(name, parse_special=True)
        return len(ids) == 1 and tokenizer.is_special_token(ids[0])

    matcher = LLMatcher(tokenizer, grammar_of(kind, text, is_special, after=after), limits=limits(), log_level=0)
    if matcher.is_error():
        raise GrammarFailed(f"the grammar cannot be compiled: {_shown(matcher.get_error())}")
    # Once, for all sequences that begin with it: the first mask builds most of what the others need.
    matcher.deep_copy().compute_bitmask()
    return matcher


class _Within:
    """The editor of one open sequence."""

    def __init__(self, compiled: "Future[LLMatcher]", model: DrawnModel, *, goes_on: bool) -> None:
        self._compiled = compiled
        self._model = model
        self._goes_on = goes_on
        self._vocabulary: Vocabulary | None = None
        self._matcher: LLMatcher | None = None
        self._seen = array("i")

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        """Raises GrammarFailed."""
        try:
            mask = self._mask(array("i", history[len(history) - position :]))
        except (GrammarFailed, KeyboardInterrupt, SystemExit):
            raise
        except TimeoutError:
            raise GrammarFailed(f"the grammar was not compiled within {_MAX_WAIT_S:g} s") from None
        # A panic of the library is no Exception, and must not end the batch.
        except BaseException as error:
            self._matcher = None
            raise GrammarFailed(f"{type(error).__name__}: {_shown(str(error))}") from error
        edits.allow(mask)
        if self._goes_on and self._vocabulary is not None:
            edits.delay(self._vocabulary.ends)
        edits.let_delayed()
        if edits.allows_nothing():
            raise GrammarFailed("the grammar allows no token that the request's other fields allow as well")

    def _mask(self, output: "array[int]") -> bytes:
        if (vocabulary := self._vocabulary) is None:
            vocabulary = self._vocabulary = vocabulary_of(self._model)
        num_seen = len(self._seen)
        matcher = self._matcher
        if matcher is None or output[:num_seen] != self._seen:
            # Not by going back: after an end llguidance 1.9 comes back to another state. 4 us for each token.
            matcher, self._seen, num_seen = self._compiled.result(_MAX_WAIT_S).deep_copy(), array("i"), 0
            self._matcher = matcher
        new = output[num_seen:]
        if not vocabulary.ends.isdisjoint(new):
            # The matcher sees no end: nothing but another one comes after it.
            return vocabulary.only_ends
        began = thread_time()
        for begin in range(0, len(new), _AT_ONCE):
            if not matcher.consume_tokens(new[begin : begin + _AT_ONCE].tolist()):
                raise self._failed(matcher.get_error())
            self._check_time(began, begin + _AT_ONCE)
        self._seen = output
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise self._failed(matcher.get_error())
        self._check_time(began, len(new))
        if (spelled := _spelled(matcher, mask, vocabulary)) is not None:
            return spelled
        num_bytes = len(vocabulary.only_ends)
        if len(mask) > num_bytes:
            mask = _cut(mask[:num_bytes], vocabulary.size)
        return mask

    def _check_time(self, began: float, num_taken: int) -> None:
        if (taken_s := thread_time() - began) > _MAX_EDIT_S + num_taken * _MAX_TOKEN_S:
            raise self._failed(f"it is too complex: {taken_s:.2f} s for the next token")

    def _failed(self, why: str) -> GrammarFailed:
        # A matcher stays in error for ever, while the next call may be for an earlier position.
        self._matcher, self._seen = None, array("i")
        return GrammarFailed(f"the grammar cannot be followed: {_shown(why)}")


def _spelled(matcher: "LLMatcher", mask: bytes, vocabulary: Vocabulary) -> bytes | None:
    """The mask where a grammar forces a text that begins like the name of a special token, or None.

    The library tokenizes forced texts as prompts are, so it would allow only that token: an end, amid an answer.
    """
    # What forces a text allows one token. 5 us for a mask of 150,000.
    if mask.count(0) != len(mask) - 1:
        return None
    only = int.from_bytes(mask, "little").bit_length() - 1
    # Where the grammar itself names the token, its bytes are none of UTF-8.
    if not vocabulary.tokenizer.is_special_token(only) or not (text := _forced_text(matcher)):
        return None
    return mask_of(vocabulary.tokenizer.greedy_tokenize(text)[:1], vocabulary.size)


def _forced_text(matcher: "LLMatcher") -> str:
    forced = matcher.compute_ff_bytes()
    return "" if forced[:1] == b"\xff" else forced.decode(errors="ignore")


def _cut(mask: bytes, size: int) -> bytes:
    """Without the tokens that the model has no logits for."""
    return (int.from_bytes(mask, "little") & ((1 << size) - 1)).to_bytes(len(mask), "little")


def _shown(problem: str) -> str:
    return problem.strip().removesuffix("<non-verbose/>").strip()[:_SHOWN_CHARS]
