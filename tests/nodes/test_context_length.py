"""What is said of the context, to operators and to clients."""

import re

import pytest

from nodes.context_length import ServedContext, over_context, over_context_in_chars

# What client libraries look for in a text: litellm the first sentence, agents the number in it.
PHRASE = re.compile(r"^This model's maximum context length is (\d+) tokens\. ")


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "rest"),
    [
        (
            3000, 2000,
            "However, you requested 5000 tokens (3000 in the messages, 2000 in the completion). "
            "Please reduce the length of the messages or completion.",
        ),
        (
            4656, 1,
            "However, your messages resulted in 4656 tokens, which leaves none for the completion. "
            "Please reduce the length of the messages.",
        ),
    ],
)  # fmt: skip
def test_too_many_tokens_are_told_as_openai_tells_them(num_prompt, num_output, rest):
    message = over_context(4656, "messages", num_prompt, num_output)
    assert (found := PHRASE.match(message))
    assert found[1] == "4656"
    assert message[found.end() :] == rest


def test_a_text_that_was_not_even_encoded_is_told_the_same_way():
    message = over_context_in_chars(4656, "prompt", 37248)
    assert (found := PHRASE.match(message))
    assert found[1] == "4656"
    assert "more than 37248 characters in your prompt" in message


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (
            ServedContext(length=4656, model_length=40960, kv_tokens=4656, more_by="--kv-memory or a larger /dev/shm"),
            "KV: 4,656 tokens; context 4,656 of the model's 40,960: for more, use --kv-memory or a larger /dev/shm",
        ),
        (ServedContext(length=2048, model_length=2048, kv_tokens=16384), "KV: 16,384 tokens; context 2,048"),
        (ServedContext(length=2048, model_length=2048), "context 2,048"),
        (
            ServedContext(length=1000, model_length=2048, kv_tokens=16384),
            "KV: 16,384 tokens; context 1,000 of the model's 2,048",
        ),
    ],
)
def test_operators_are_told_what_is_served_and_why(context, words):
    assert str(context) == words
