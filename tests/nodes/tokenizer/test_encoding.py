"""Encoding against transformers with the same files, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nodes.model_spec import resolve_model
from nodes.tokenizer.errors import ContextLengthExceeded, EmptyPrompt, InvalidTokenId, InvalidValue
from nodes.tokenizer.texts.encoding import TextEncoder, load_encoder
from nodes.tokenizer.texts.truncation import Truncation

TEXTS = [
    "",
    "Hello",
    " The  quick\n\nfox",
    "naïve 你好 🙂",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|eot_id|>b",
    "x" * 300,
]


def spec_of(directory, **fields):
    special_tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    fields = {"special_tokens": special_tokens, "vocab_size": 500, "context_length": 1000} | fields
    return msgspec.structs.replace(resolve_model("echo"), tokenizer_path=str(directory / "tokenizer.json"), **fields)


CONFIGS = [
    {"add_bos": True},
    {"add_bos": False},
    {"add_bos": False, "add_bos_token": True, "add_eos_token": True},
    {"add_bos": True, "add_bos_token": False},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_same_ids_as_transformers(make_directory, config):
    directory = make_directory("encoding", **config)
    reference, encoder = AutoTokenizer.from_pretrained(directory), load_encoder(spec_of(directory))
    for text in TEXTS:
        for special in (True, False):
            expected = reference(text, add_special_tokens=special)["input_ids"]
            assert encoder.encode(text, add_special_tokens=special) == expected
            for skip in (True, False):
                assert encoder.decode(expected, skip_special_tokens=skip) == reference.decode(
                    expected, skip_special_tokens=skip
                )


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(resolve_model("echo"), 64)


@given(text=st.text(max_size=50))
def test_text_of_ids_of_text(encoder, text):
    ids = encoder.encode(text, add_special_tokens=True)
    assert encoder.decode(ids, skip_special_tokens=False) == text
    encoder.check_ids(ids, "prompt")


def test_a_text_that_cannot_fit_is_refused_by_its_length(encoder):
    encoder.check_chars("x" * encoder.max_chars, "prompt")
    with pytest.raises(ContextLengthExceeded) as caught:
        encoder.check_chars("x" * (encoder.max_chars + 1), "messages")
    assert caught.value.param == "messages"
    assert caught.value.message.startswith("This model's maximum context length is 64 tokens. However, there are more")
    assert encoder.max_chars == 64 * len("<|endoftext|>")


def test_no_token_is_longer_than_the_bound_says(make_directory):
    encoder = load_encoder(spec_of(make_directory("bound"), context_length=10))
    longest = max((encoder.decode([i], skip_special_tokens=False) for i in range(400)), key=len)
    assert len(longest) * 10 <= encoder.max_chars


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ([], EmptyPrompt),
        ([1] * 64, ContextLengthExceeded),
        ([1, -1], InvalidTokenId),
        ([1, 259], InvalidTokenId),
        ([1 << 70], InvalidTokenId),
    ],
)
def test_prompts_that_cannot_be_served(encoder, token_ids, error):
    with pytest.raises(error) as caught:
        encoder.check_prompt(token_ids, "prompt")
    assert caught.value.param == "prompt"
    if error is ContextLengthExceeded:
        words = "This model's maximum context length is 64 tokens. However, your prompt resulted in 64 tokens"
        assert caught.value.message.startswith(words)


def test_prompts_that_can(encoder):
    assert isinstance(encoder, TextEncoder)
    encoder.check_prompt([0], "prompt")
    encoder.check_prompt([258] * 63, "prompt")
    encoder.check_ids([], "tokens")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", [{"add_bos": True}, {"add_bos": False}], ids=str)
def test_a_prompt_is_cut_as_transformers_cuts_it(make_directory, config, side):
    directory = make_directory("cut", **config)
    reference = AutoTokenizer.from_pretrained(directory, truncation_side=side)
    encoder = load_encoder(spec_of(directory))
    for text in TEXTS:
        for special in (True, False):
            for most in (1, 2, 3, 7, 1000):
                truncation = Truncation(most, keeps_first=side == "right")
                added = reference.num_special_tokens_to_add() if special else 0
                if text and most <= added:
                    # transformers gives some of what it adds, and nothing of the text.
                    with pytest.raises(InvalidValue, match=f"adds {added} to a text: give at least {added + 1}"):
                        encoder.encode(text, add_special_tokens=special, truncation=truncation)
                    continue
                expected = reference(text, add_special_tokens=special, truncation=True, max_length=most)["input_ids"]
                assert encoder.encode(text, add_special_tokens=special, truncation=truncation) == expected


def test_ids_are_cut_at_either_end_and_what_a_tokenizer_added_stays():
    ids = list(range(10))
    assert Truncation().cut(ids) == Truncation(10).cut(ids) == Truncation(99).cut(ids) == ids
    assert Truncation(3).cut(ids) == [7, 8, 9]
    assert Truncation(3, keeps_first=True).cut(ids) == [0, 1, 2]
    added = [1, *[0] * 7, 1, 1]
    assert Truncation(5).cut(ids, added) == [0, 6, 7, 8, 9]
    assert Truncation(5, keeps_first=True).cut(ids, added) == [0, 1, 2, 8, 9]
    assert Truncation(4).cut(ids, added) == [0, 7, 8, 9]
    for most in (1, 2, 3):
        with pytest.raises(InvalidValue, match="give at least 4") as refused:
            Truncation(most).cut(ids, added)
        assert refused.value.param == "truncate_prompt_tokens"
    # Nothing is cut, so nothing is missing: a text of no tokens.
    assert Truncation(3).cut([0, 8, 9], [1, 1, 1]) == [0, 8, 9]
    with pytest.raises(InvalidValue, match="adds 3 to a text: give at least 4"):
        Truncation(2).cut([0, 8, 9], [1, 1, 1])
