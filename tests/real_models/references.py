"""What transformers makes of a prompt: greedy, in float32, by its own `generate`."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real_models.texts import CONVERSATIONS, PROMPTS

MAX_TOKENS = 24


class Reference(NamedTuple):
    """One answer, as a client would be given it."""

    text: str
    finish_reason: str
    num_prompt_tokens: int


class References(NamedTuple):
    """Answers to all `PROMPTS` and, by a model with a chat template, to all `CONVERSATIONS`."""

    prompts: dict[str, Reference]
    chats: dict[str, Reference]


@functools.cache
def references(folder: Path) -> References:
    """Loads the model once and lets it go, since a mesh that is compared with it needs the memory."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def answers(texts: dict[str, str], **options: bool) -> dict[str, Reference]:
        # In batches, which is much faster. A long text is by itself: others would be padded to its length.
        found: dict[str, Reference] = {}
        for batch in ([name for name in texts if name != "long"], [name for name in texts if name == "long"]):
            if batch:
                found |= zip(batch, answered([texts[name] for name in batch], options), strict=True)
        return found

    def answered(texts: list[str], options: dict[str, bool]) -> Iterator[Reference]:
        given = tokenizer(texts, return_tensors="pt", padding=True, **options)
        with torch.inference_mode():
            rows = model.generate(**given, max_new_tokens=MAX_TOKENS, do_sample=False)
        for row, mask in zip(rows.tolist(), given["attention_mask"].tolist(), strict=True):
            # A row that has ended is padded to the length of the others.
            ids = list(itertools.takewhile(lambda one: one not in ends, row[len(mask) :]))
            reason = "stop" if len(ids) < len(row) - len(mask) else "length"
            yield Reference(tokenizer.decode(ids, skip_special_tokens=True), reason, sum(mask))

    prompts = answers(PROMPTS)
    if tokenizer.chat_template is None:
        return References(prompts, {})
    rendered = {
        name: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for name, messages in CONVERSATIONS.items()
    }
    return References(prompts, answers(rendered, add_special_tokens=False))
