"""Pairs of texts: the ids and token types of transformers with the same files, and the parts of a template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nodes.tokenizer.errors import InvalidValue
from nodes.tokenizer.texts.encoding import TextEncoder
from nodes.tokenizer.texts.truncation import Truncation, longest_first

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abcdefgh"]
TEXT = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12).map(" ".join)
PROCESSORS = {
    "bert": processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1), trim_offsets=False, add_prefix_space=False),
    "end": processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 2)]
    ),
    "none": None,
}  # fmt: skip


def made(name):
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[name] is not None:
        tokenizer.post_processor = PROCESSORS[name]
    return tokenizer


ENCODERS = {name: TextEncoder(made(name), len(WORDS), 1000) for name in PROCESSORS}
REFERENCES = {
    (name, side): PreTrainedTokenizerFast(
        tokenizer_object=made(name), truncation_side=side, pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids"],
    )
    for name in PROCESSORS
    for side in ("left", "right")
}  # fmt: skip


@given(
    name=st.sampled_from([*PROCESSORS]),
    side=st.sampled_from(["left", "right"]),
    first=TEXT,
    second=TEXT,
    most=st.integers(0, 30),
)
def test_ids_and_types_are_those_of_transformers(name, side, first, second, most):
    reference = REFERENCES[name, side]
    truncation = Truncation(most, keeps_first=side == "right")
    added = reference.num_special_tokens_to_add(pair=True)
    if 0 < most < len(reference(first, second)["input_ids"]) and most < added + 2:
        with pytest.raises(InvalidValue, match=f"adds {added} to a pair of texts: give at least {added + 2}"):
            ENCODERS[name].encode_pair(first, second, add_special_tokens=True, truncation=truncation)
        return
    options = {"truncation": "longest_first", "max_length": most} if most else {}
    expected = reference(first, second, **options)
    pair = ENCODERS[name].encode_pair(first, second, add_special_tokens=True, truncation=truncation)
    types = expected["token_type_ids"]
    assert pair.token_ids == expected["input_ids"]
    if name == "none":
        # transformers has types of its own for what no post-processor joins; no model with types is without one.
        assert pair.second_from == 0
    elif 1 in types:
        # All after the first one of type 1 are: that is why its place says everything.
        assert types == [0] * pair.second_from + [1] * (len(types) - pair.second_from)
    else:
        assert pair.second_from == 0


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30))
def test_the_longer_one_gives_first(first, second, most):
    left = longest_first(first, second, most)
    assert sum(left) == min(first + second, most)
    assert (left[0] <= first, left[1] <= second) == (True, True)
    if first + second > most:
        short = min(first, second)
        assert min(left) == min(short, most // 2)


@given(first=TEXT, second=TEXT, most=st.integers(0, 30), keeps_first=st.booleans())
def test_a_template_stays_whole_around_what_is_cut(first, second, most, keeps_first):
    encoder = ENCODERS["bert"]

    def encode(text):
        return encoder.encode(text, add_special_tokens=False)

    pair = encoder.encode_pair(
        first, second, add_special_tokens=False, after="c d", truncation=Truncation(most, keeps_first=keeps_first)
    )
    head, middle, tail = encode(first), encode(second), encode("c d")
    kept = middle
    if most:
        # One is left of it, whatever is wanted: the gateway sees that it is too much.
        room = max(most - len(head) - len(tail), 1)
        kept = middle[:room] if keeps_first else middle[len(middle) - min(room, len(middle)) :]
    assert pair == ([*head, *kept, *tail], 0)
