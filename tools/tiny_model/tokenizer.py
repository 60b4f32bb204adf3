"""The tokenizer and chat template of `tiny`, trained on the grammar's own text.

Byte-level BPE: all 256 bytes are tokens, so every text encodes and decodes to itself. Digits stand
alone. Merges are learnt from ASCII text only: a character beyond ASCII is always several tokens,
which is what tests of incremental detokenization need. Called by the training script.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_model.grammar import Message, training_examples

VOCABULARY_SIZE: Final = 1024
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END)
MAX_LENGTH: Final = 2048

# One digit a token; words with the space before them; white space apart.
SPLIT: Final = r"\d|[^\S\r\n]?\p{L}+|[^\S\r\n]?[^\s\p{L}\d]+|\r?\n|\s"

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('tiny knows the roles system, user and assistant, not ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] != 'text' %}
                {{- raise_exception('tiny reads text only, not ' + part['type']) }}
            {%- endif %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(messages: Sequence[Message], *, answer: str | None = None) -> str:
    """The text that the chat template makes of text messages, ending in the assistant's start.

    With ``answer``, the finished turn follows.
    """
    text = "".join(f"{TURN_START}{m.role}\n{m.content}{TURN_END}\n" for m in messages)
    text += f"{TURN_START}assistant\n"
    return text if answer is None else f"{text}{answer}{TURN_END}\n"


def _corpus(num_examples: int) -> Iterator[str]:
    for example in islice(training_examples(seed=1), num_examples):
        for message in (*example.messages, Message("assistant", example.answer)):
            yield "".join(character if character.isascii() else "\n" for character in message.content)
        yield "system\nuser\nassistant\n"


def train_tokenizer(num_examples: int = 60_000) -> Tokenizer:
    """Learn the merges from the first examples of a seed of its own; always the same result."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_examples), trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist. Raises KeyError if it does not."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}; was it trained by train_tokenizer?")
    return found


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
