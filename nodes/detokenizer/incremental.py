"""Token ids to text, one token at a time: never half a character, and in total the text of a whole decode.

A decoder's output after n tokens depends on those n tokens only, not on how they were batched; so a stream
can be opened again, here or at another detokenizer, and go on at the same text offset. State is bounded: at most
three bytes, or a window of a few tokens. Used by `nodes/detokenizer/core.py`.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer
from typing_extensions import override

from nodes.model_spec.token_bytes import bytes_of_stand_ins, is_byte_level, special_ids

MAX_PENDING_TOKENS: Final = 8
"""A character is at most four bytes; tokens that have shown nothing after this many are shown as they are."""

_MAX_TABLES: Final = 8
"""Of pieces, one for each set of hidden tokens, at some MB each. A model has three: none, all special ones, all but the
marks of its calls and reasoning."""

_REPLACEMENT: Final = "\ufffd"


class TokenDecoder(Protocol):
    """Incremental decode state of one stream."""

    def push(self, token_id: int) -> str:
        """Text that this token completes, often its own; empty if a character is still incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end of a stream; an incomplete character is U+FFFD."""
        ...


class BytePieces(dict[int, str | bytes]):
    """Token id -> its text if that is whole characters, else its bytes. Filled as tokens appear.

    Bounded by the vocabulary. Mirrors the ByteLevel decoder of `tokenizers`: a token of byte stand-ins gives those
    bytes, any other its own UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids

    def __missing__(self, token_id: int) -> str | bytes:
        token = _token_of(self._tokenizer, token_id)
        if token is None:
            return ""
        piece = self[token_id] = "" if token_id in self._hidden_ids else _piece_of(token)
        return piece


class ByteDecoder(TokenDecoder):
    """For byte-level vocabularies, where decoding is concatenation of bytes. Pending: under four bytes."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._pending = b""

    @override
    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str) and not self._pending:
            return piece
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    @override
    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class WindowDecoder(TokenDecoder):
    """For all other vocabularies, whose decoders look at neighbours (spaces, byte fallback, WordPiece).

    Decodes a window of the last tokens with and without the new ones and shows the difference, as text-generation
    servers have done since TGI. `prompt_tail` gives the first token its left neighbour.
    """

    __slots__ = ("_context_text", "_decode", "_is_shown", "_num_context", "_window")

    def __init__(
        self, decode: Callable[[list[int]], str], is_shown: Callable[[int], bool], prompt_tail: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._window = [token_id for token_id in prompt_tail if is_shown(token_id)]
        self._num_context = len(self._window)
        self._context_text = decode(self._window)

    @override
    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        text = self._new_text()
        undecided = not text or text.endswith(_REPLACEMENT)
        if undecided and len(self._window) - self._num_context < MAX_PENDING_TOKENS:
            return ""
        self._advance()
        return text

    @override
    def flush(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # With byte fallback, one bad byte spoils a whole run: what has been shown stays, the rest is decoded alone.
        return self._decode(self._window[self._num_context :])

    def _advance(self) -> None:
        if self._num_context < len(self._window):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._context_text = self._decode(self._window)


class DecoderFactory:
    """Makes decoders for one tokenizer; knows which kind it needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids(tokenizer)
        self._is_byte_level = is_byte_level(tokenizer)
        self._pieces: dict[frozenset[int], BytePieces] = {}
        if self._is_byte_level:
            # Here, where the tokenizer is loaded in a thread: for a stream all others would wait while it is made.
            for hidden in (self._special_ids, frozenset[int]()):
                self._pieces_without(hidden)

    def decoder(
        self, skip_special_tokens: bool, prompt_tail: Sequence[int] = (), shown_ids: Collection[int] = ()
    ) -> TokenDecoder:
        """A decoder for a new stream. `prompt_tail`: the last prompt ids, which byte-level vocabularies do not need.
        `shown_ids`: special tokens that have a text in spite of `skip_special_tokens`.
        """
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        if shown_ids:
            hidden = hidden.difference(shown_ids)
        if self._is_byte_level:
            return ByteDecoder(self._pieces_without(hidden))
        tokenizer = self._tokenizer
        return WindowDecoder(
            lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
            lambda token_id: token_id not in hidden and _token_of(tokenizer, token_id) is not None,
            prompt_tail,
        )

    def _pieces_without(self, hidden: frozenset[int]) -> BytePieces:
        pieces = self._pieces.get(hidden)
        if pieces is None:
            # The sets come from gateways; one that sends others all the time must not take all memory.
            if len(self._pieces) >= _MAX_TABLES:
                self._pieces.clear()
            pieces = self._pieces[hidden] = BytePieces(self._tokenizer, hidden)
        return pieces


def _token_of(tokenizer: Tokenizer, token_id: int) -> str | None:
    # Models may draw ids that the tokenizer does not have (padded vocabularies): those have no text.
    return tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None


def _piece_of(token: str) -> str | bytes:
    data = bytes_of_stand_ins(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
