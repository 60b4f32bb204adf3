"""The tokenizer of `echo` and `random:*`: one token per byte, three special tokens, and filler up to a vocabulary size.

Ids: 0 to 255 are the bytes, then the special tokens, then fillers. A filler decodes to a word of its own with a space
before it, and no text encodes to it, so what a random model draws decodes to whole characters unless it draws the bytes
of a multi-byte character only in part.
"""

import json
from typing import Final

BOS_TOKEN: Final = "<|endoftext|>"
TURN_TOKEN: Final = "<|im_start|>"
EOS_TOKEN: Final = "<|im_end|>"
SPECIAL_TOKEN_IDS: Final[dict[str, int]] = {TURN_TOKEN: 256, EOS_TOKEN: 257, BOS_TOKEN: 258}
NUM_BASE_TOKENS: Final = 256 + len(SPECIAL_TOKEN_IDS)
"""The bytes and the special tokens; fillers come after them."""


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE vocabularies, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return [
        text for _, text in sorted([(b, chr(b)) for b in printable] + [(b, chr(256 + i)) for i, b in enumerate(others)])
    ]


def byte_tokenizer_json(vocab_size: int = NUM_BASE_TOKENS) -> str:
    """A `tokenizer.json` document of exactly `vocab_size` ids; ValueError if that is too few for bytes and specials."""
    if vocab_size < NUM_BASE_TOKENS:
        raise ValueError(f"a byte tokenizer needs at least {NUM_BASE_TOKENS} ids, not {vocab_size}")
    vocabulary = {text: byte for byte, text in enumerate(byte_alphabet())}
    vocabulary |= SPECIAL_TOKEN_IDS
    vocabulary |= {f"Ġw{number}": number for number in range(NUM_BASE_TOKENS, vocab_size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": number, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, number in SPECIAL_TOKEN_IDS.items()
    ]
    no_merges: list[str] = []
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": no_merges},
    }
    return json.dumps(document)
