"""The bytes of each token, against what the library decodes."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import resolve_model
from nodes.model_spec.token_bytes import token_bytes
from nodes.model_spec.vocabulary import load_tokenizer
from tests.nodes.tokenizer.conftest import SPECIAL, make_tokenizer

WORDS = ["▁the", "▁cat", "s", "▁你", "好", "▁", ".", "▁▁"]
PIECES = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]


def sentencepiece(*parts: decoders.Decoder) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(list(parts)) if parts else decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken("\n\n"), AddedToken("a word▁")])
    return tokenizer


LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))


@pytest.mark.parametrize("parts", [LLAMA, LLAMA[:3], ()], ids=["llama", "gemma", "metaspace"])
def test_pieces(parts: tuple[decoders.Decoder, ...]) -> None:
    tokenizer = sentencepiece(*parts)
    table = token_bytes(tokenizer)
    assert len(table) == tokenizer.get_vocab_size(with_added_tokens=True)
    anchor = tokenizer.token_to_id("s")
    for token_id, data in enumerate(table):
        # Beside another: at the beginning of a text a space is taken away.
        text = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
        assert text in ("s" + data.decode(errors="replace"), "s")
        assert text != "s" or not data
    named = {token: table[tokenizer.token_to_id(token)] for token in ("▁the", "▁▁", "<s>", "\n\n", "a word▁")}
    assert named == {"▁the": b" the", "▁▁": b"  ", "<s>": b"<s>", "\n\n": b"\n\n", "a word▁": b"a word "}
    if parts:
        assert [table[tokenizer.token_to_id(f"<0x{byte:02X}>")] for byte in range(256)] == [
            bytes([byte]) for byte in range(256)
        ]


@pytest.mark.parametrize("name", ["tiny", "echo", "trained"])
def test_byte_level(name: str) -> None:
    tokenizer = make_tokenizer() if name == "trained" else load_tokenizer(resolve_model(name))
    tokenizer.add_tokens(["é and a space", "<think hard>"])
    table = token_bytes(tokenizer)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    for token_id, data in enumerate(table):
        token = tokenizer.id_to_token(token_id)
        is_stand_in = all(character in byte_of for character in token)
        assert data == (bytes(byte_of[character] for character in token) if is_stand_in else token.encode())
    dice = random.Random(0)
    for _ in range(100):
        ids = dice.choices(range(len(table)), k=30)
        text = b"".join(table[token_id] for token_id in ids).decode(errors="replace")
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
    if name == "trained":
        assert [table[tokenizer.token_to_id(token)] for token in SPECIAL] == [token.encode() for token in SPECIAL]


def test_other_kinds_are_what_the_library_shows() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert token_bytes(tokenizer) == [tokenizer.decode([n], skip_special_tokens=False).encode() for n in range(3)]
    assert token_bytes(Tokenizer(models.WordLevel({"a": 0, "b": 2}, "a"))) == [b"a", b"", b"b"]
    tokenizer = Tokenizer(models.BPE({"xa": 0, "b": 1}, []))
    tokenizer.decoder = decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse()])
    assert token_bytes(tokenizer) == [b"xa", b"b"]
    assert token_bytes(Tokenizer.from_str(byte_tokenizer_json()))[256:] == [
        b"<|im_start|>",
        b"<|im_end|>",
        b"<|endoftext|>",
    ]
