"""The bytes that each token stands for, read from the kind of decoder that a tokenizer.json names.

    byte-level (GPT-2, Llama 3, Qwen)       printable stand-ins for bytes
    SentencePiece's (Llama 2, Gemma)        `▁` for a space, `<0xE2>` for a byte
    others                                  what the library decodes the token to by itself

Special and added tokens go through the same decoder, as in the library. What a decoder does to the beginning of a
text, such as taking a space away, is no token's. Used by the tokenizer and detokenizer roles. Pure.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final, cast

from tokenizers import Tokenizer

from nodes.bundled.byte_tokenizer import byte_alphabet

_BYTE_OF: Final = {character: byte for byte, character in enumerate(byte_alphabet())}
_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BY_TOKEN: Final = frozenset({"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"})
"""Decoders that change tokens one by one, but for the beginning and the end of a text."""


def bytes_of_stand_ins(token: str) -> bytes:
    """Bytes of a byte-level token: its own UTF-8 if it has characters that stand for no byte."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder only concatenates bytes (GPT-2, Llama 3, Qwen)."""
    return [part["type"] for part in _decoders(tokenizer)] == ["ByteLevel"]


def added_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """By text, the tokens that were added to the vocabulary, special ones and others."""
    return {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that are left out where special tokens are skipped."""
    # Found by decoding: a token can be special by a later declaration, which its own flag does not show.
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(i for i in added if not tokenizer.decode([i], skip_special_tokens=True))


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes by id, from 0 to the highest id; empty for ids that no token has."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    read = _reader(tokenizer)
    table: list[bytes] = []
    for token_id in range(max(ids, default=-1) + 1):
        token = tokenizer.id_to_token(token_id)
        table.append(b"" if token is None else read(token_id, token))
    return table


def _reader(tokenizer: Tokenizer) -> Callable[[int, str], bytes]:
    parts = _decoders(tokenizer)
    if is_byte_level(tokenizer):
        return lambda _, token: bytes_of_stand_ins(token)
    replaced = [_replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")]
    if not parts or {part["type"] for part in parts} - _BY_TOKEN or None in replaced:
        # Pieces of words (WordPiece) and tokens without a decoder are shown as they would be at a text's beginning.
        return lambda token_id, _: tokenizer.decode([token_id], skip_special_tokens=False).encode()
    pairs = [pair for pair in replaced if pair is not None]
    falls_back = any(part["type"] == "ByteFallback" for part in parts)

    def read(_: int, token: str) -> bytes:
        for old, new in pairs:
            token = token.replace(old, new)
        byte = _FALLBACK.fullmatch(token) if falls_back else None
        return token.encode() if byte is None else bytes([int(byte[1], 16)])

    return read


def _replacement(part: dict[str, Any]) -> tuple[str, str] | None:
    """What is replaced by what; None for a regular expression."""
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    old = part["pattern"].get("String")
    return None if old is None else (old, part["content"])


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    kind = cast("dict[str, Any]", json.loads(tokenizer.decoder.__getstate__()))
    return kind["decoders"] if kind["type"] == "Sequence" else [kind]
