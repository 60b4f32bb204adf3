"""Incremental decoding against the whole decode of `tokenizers`, for any sequence of ids."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.detokenizer.incremental import MAX_PENDING_TOKENS, DecoderFactory
from nodes.model_spec.token_bytes import is_byte_level

TEXT = ["the cat sat on the mat", "naïve café — 你好世界", "🙂👩‍👩‍👧‍👦 emoji 🇩🇪", "def f(x):\n    return x\n"] * 3


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    # One outside the byte alphabet, one inside of it whose bytes are no UTF-8, one plain.
    tokenizer.add_tokens([AddedToken("<think hard>"), AddedToken("é"), AddedToken("</think>")])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: metaspace, byte fallback, first space stripped."""
    words = ["▁the", "▁cat", "s", "▁你", "好", "▁", ".", "▁sat"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


BYTE_LEVEL = byte_level_bpe()
BYTE_LEVEL_SIZE = BYTE_LEVEL.get_vocab_size(with_added_tokens=True)
BYTE_DECODERS = DecoderFactory(BYTE_LEVEL)
WINDOWED = sentencepiece_like()
WINDOWED_DECODERS = DecoderFactory(WINDOWED)


def pushed(decoder, token_ids):
    return [decoder.push(token_id) for token_id in token_ids]


def test_kind_is_read_from_the_decoder():
    assert is_byte_level(BYTE_LEVEL)
    assert is_byte_level(Tokenizer.from_str(byte_tokenizer_json(300)))
    wrapped = byte_level_bpe()
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert is_byte_level(wrapped)
    assert not is_byte_level(WINDOWED)
    assert not is_byte_level(Tokenizer(models.WordLevel({"a": 0}, "a")))


# Half a character at the end is shown as a replacement.
@example([BYTE_LEVEL.token_to_id("Ã")], True)
@given(st.lists(st.integers(0, BYTE_LEVEL_SIZE + 3), max_size=60), st.booleans())
def test_any_ids_give_the_whole_decode(token_ids, skip):
    decoder = BYTE_DECODERS.decoder(skip)
    text = "".join(pushed(decoder, token_ids)) + decoder.flush()
    assert text == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert decoder.flush() == ""


def test_special_tokens_that_are_shown():
    added = BYTE_LEVEL.get_added_tokens_decoder()
    special = [i for i in added if not BYTE_LEVEL.decode([i], skip_special_tokens=True)]
    shown, hidden = special[0], special[1]
    for factory, tokenizer in ((BYTE_DECODERS, BYTE_LEVEL), (WINDOWED_DECODERS, WINDOWED)):
        ids = [i for i in tokenizer.get_added_tokens_decoder() if not tokenizer.decode([i], skip_special_tokens=True)]
        for one in ids:
            text = "".join(pushed(factory.decoder(True, shown_ids=[one]), ids))
            assert text == tokenizer.id_to_token(one)
            assert "".join(pushed(factory.decoder(True), ids)) == ""
    assert shown != hidden


def test_the_usual_tables_are_made_before_there_are_streams(monkeypatch):
    factory = DecoderFactory(BYTE_LEVEL)
    monkeypatch.setattr("nodes.detokenizer.incremental.BytePieces", None)
    factory.decoder(True)
    factory.decoder(False)


def test_tables_of_pieces_are_few(monkeypatch):
    # Fewer than this tokenizer has sets of special tokens.
    monkeypatch.setattr("nodes.detokenizer.incremental._MAX_TABLES", 2)
    factory = DecoderFactory(BYTE_LEVEL)
    assert factory._special_ids
    for token_id in (*factory._special_ids, *range(100)):
        assert factory.decoder(True, shown_ids=[token_id]).push(BYTE_LEVEL.token_to_id("a")) == "a"
        assert len(factory._pieces) <= 2


@pytest.mark.parametrize("skip", [True, False])
def test_every_token_alone(skip):
    for token_id in range(BYTE_LEVEL_SIZE):
        decoder = BYTE_DECODERS.decoder(skip)
        text = decoder.push(token_id) + decoder.flush()
        assert text == BYTE_LEVEL.decode([token_id], skip_special_tokens=skip)


@given(st.text(max_size=40).filter(lambda text: "é" not in text))  # that one is an added token here
def test_real_text_never_shows_half_a_character(text):
    decoder = BYTE_DECODERS.decoder(False)
    pieces = pushed(decoder, BYTE_LEVEL.encode(text, add_special_tokens=False).ids)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)
    assert shown == text
    assert decoder.flush() == ""


@given(st.lists(st.integers(0, BYTE_LEVEL_SIZE - 1), max_size=30), st.data())
def test_output_after_n_tokens_depends_on_them_only(token_ids, data):
    cut = data.draw(st.integers(0, len(token_ids)))
    whole, again = BYTE_DECODERS.decoder(False), BYTE_DECODERS.decoder(False)
    first = "".join(pushed(whole, token_ids))
    silent = "".join(pushed(again, token_ids[:cut]))
    assert first[: len(silent)] == silent
    assert "".join(pushed(again, token_ids[cut:])) == first[len(silent) :]


def test_ids_of_no_token_have_no_text():
    decoder = BYTE_DECODERS.decoder(True)
    assert pushed(decoder, [-1, BYTE_LEVEL_SIZE, 1 << 40]) == ["", "", ""]
    window = WINDOWED_DECODERS.decoder(True)
    assert pushed(window, [-1, 10**6, 1 << 40]) == ["", "", ""]


def test_special_token_between_the_bytes_of_a_character():
    first, second = BYTE_LEVEL.token_to_id("Ã"), BYTE_LEVEL.token_to_id("©")
    special = BYTE_LEVEL.token_to_id("<|im_end|>")
    decoder = BYTE_DECODERS.decoder(True)
    assert pushed(decoder, [first, special, second]) == ["", "", "é"]
    decoder = BYTE_DECODERS.decoder(False)
    assert pushed(decoder, [first, special, second]) == ["", "\ufffd<|im_end|>", "\ufffd"]


def windowed_id(token):
    token_id = WINDOWED.token_to_id(token)
    assert token_id is not None
    return token_id


WORDS = ["▁the", "▁cat", "s", "▁你", "好", ".", "▁sat"]


@given(st.lists(st.sampled_from([[w] for w in WORDS] + [["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]]), max_size=20))
def test_windowed_text_is_the_whole_decode(groups):
    token_ids = [windowed_id(token) for group in groups for token in group]
    decoder = WINDOWED_DECODERS.decoder(True)
    pieces = [*pushed(decoder, token_ids), decoder.flush()]
    assert "".join(pieces) == WINDOWED.decode(token_ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_windowed_first_token_keeps_its_space_after_the_prompt():
    tail = [windowed_id("<s>"), windowed_id("▁the")]
    assert WINDOWED_DECODERS.decoder(True, tail).push(windowed_id("▁cat")) == " cat"
    assert WINDOWED_DECODERS.decoder(True).push(windowed_id("▁cat")) == "cat"


def test_windowed_hides_special_tokens_only_where_asked():
    assert WINDOWED_DECODERS.decoder(True).push(windowed_id("<s>")) == ""
    assert WINDOWED_DECODERS.decoder(False).push(windowed_id("<s>")) == "<s>"


def test_windowed_bad_byte_spoils_nothing_before_it():
    ids = [windowed_id(t) for t in ("<0xC3>", "<0xA9>", "<0xC3>", "▁cat")]
    decoder = WINDOWED_DECODERS.decoder(True, [windowed_id("▁the")])
    assert pushed(decoder, ids) == ["", "é", "", "\ufffd cat"]


@pytest.mark.parametrize("token", ["<0xFF>", "▁"])
def test_windowed_state_is_bounded(token):
    decoder = WINDOWED_DECODERS.decoder(True)
    shown = pushed(decoder, [windowed_id(token)] * 100)
    assert len(decoder._window) <= 2 * MAX_PENDING_TOKENS
    assert len("".join(shown)) >= 80


def test_windowed_flush_shows_what_is_pending():
    decoder = WINDOWED_DECODERS.decoder(True)
    assert pushed(decoder, [windowed_id("▁the"), windowed_id("<0xF0>")]) == ["the", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
