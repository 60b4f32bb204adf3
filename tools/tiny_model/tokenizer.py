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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_model.conversation import CALL_END, CALL_START, Message, Tool
from tools.tiny_model.grammar import PLAIN_FAMILY_NAMES, training_examples

VOCABULARY_SIZE: Final = 1024
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END)
CALL_MARKS: Final = (CALL_START, CALL_END)
MAX_LENGTH: Final = 2048

# One digit a token; words with the space before them; white space apart.
SPLIT: Final = r"\d|[^\S\r\n]?\p{L}+|[^\S\r\n]?[^\s\p{L}\d]+|\r?\n|\s"

CHAT_TEMPLATE: Final = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part['type'] != 'text' %}
                {{- raise_exception('tiny reads text only, not ' + part['type']) }}
            {%- endif %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro signature(function) %}
    {{- '\\n' + function['name'] + '(' }}
    {%- for name, schema in ((function['parameters'] or {})['properties'] or {}).items() %}
        {%- set type = schema['type'] or 'any' %}
        {{- name + ': ' + (type if type is string else type | join('|')) + ('' if loop.last else ', ') }}
    {%- endfor %}
    {{- ')' }}
{%- endmacro %}
{%- macro call(function) %}
    {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
    {{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
    {{- '}\\n</tool_call>' }}
{%- endmacro %}
{%- set begins_with_system = messages and messages[0]['role'] == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if begins_with_system %}
        {{- text(messages[0]['content']) + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- signature(tool['function'] or tool) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set turns = messages[1:] if tools and begins_with_system else messages %}
{%- for message in turns %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('tiny knows the roles system, user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) }}
    {%- for one in message['tool_calls'] or [] %}
        {{- '\\n' if message['content'] or not loop.first }}
        {{- call(one['function'] or one) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(messages: Sequence[Message], *, tools: Sequence[Tool] = (), answer: str | None = None) -> str:
    """The text that the chat template makes of text messages, ending in the assistant's start.

    With ``answer``, the finished turn follows.
    """
    if tools:
        offered = "\n".join(["Tools:", *(tool.signature() for tool in tools)])
        if messages and messages[0].role == "system":
            offered = f"{messages[0].content}\n\n{offered}"
            messages = messages[1:]
        messages = [Message("system", offered), *messages]
    text = "".join(f"{TURN_START}{m.role}\n{m.text()}{TURN_END}\n" for m in messages)
    text += f"{TURN_START}assistant\n"
    return text if answer is None else f"{text}{answer}{TURN_END}\n"


def _corpus(num_examples: int) -> Iterator[str]:
    for example in islice(training_examples(1, PLAIN_FAMILY_NAMES), num_examples):
        for message in (*example.messages, Message("assistant", example.answer)):
            yield "".join(character if character.isascii() else "\n" for character in message.content)
        yield "system\nuser\nassistant\n"


def train_tokenizer(num_examples: int = 60_000) -> Tokenizer:
    """Learn the merges from the first examples of a seed of its own; always the same result.

    The marks of calls are tokens that decoding shows, as in Qwen's tokenizers: a call is part of an answer.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(CALL_MARKS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_examples), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in CALL_MARKS])
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
