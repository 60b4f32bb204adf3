"""Which tokens end an answer: all that a config or the tokenizer names, each with the file that names it. Pure.

One file alone would let answers run on: `config.json` often names the token that ends a document, the tokenizer or
`generation_config.json` the one that ends a turn of a chat. Used by `directory.py` and by `cli/plan/model.py`.
"""

import msgspec

from nodes.model_spec.checkpoint_files import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE
from nodes.models.config_fields import ConfigFields
from nodes.models.spec import ModelSpec, VocabularyFacts


def configured_ends(generation: ConfigFields, config: ConfigFields, vocab_size: int) -> dict[int, str]:
    """Ids with the file that names them, the generation config's first. Raises ModelDamaged."""
    ends = dict.fromkeys(generation.token_ids("eos_token_id", vocab_size), GENERATION_FILE)
    return ends | {i: CONFIG_FILE for i in config.token_ids("eos_token_id", vocab_size) if i not in ends}


def with_vocabulary(spec: ModelSpec, facts: VocabularyFacts) -> ModelSpec:
    """The model with what its tokenizer says: the end token that it names, beside those of its configs, the tokens that
    ask for a middle, and what is worth a note. A request ends at any end token; one that the model has no embedding for
    can never be drawn.
    """
    ends, said_by, notes = spec.eos_token_ids, dict(spec.said_by), list(spec.notes)
    end, text = facts.eos_token_id, spec.special_tokens.get("eos_token")
    if end is None and text is not None:
        notes.append(f"{spec.name}'s eos_token {text!r} is no token of its tokenizer, so it ends nothing")
    elif end is not None and end >= spec.vocab_size:
        notes.append(f"{spec.name}'s eos_token {text!r} has id {end}, which the model cannot draw: it ends nothing")
    elif end is not None and end not in ends:
        ends += (end,)
        said_by[f"eos_token_ids.{end}"] = TOKENIZER_FILE
    if (num_more := facts.num_tokens - spec.vocab_size) > 0:
        notes.append(
            f"{spec.name}'s tokenizer has {num_more:,} tokens more than the model has embeddings: prompts with one of"
            " them are refused"
        )
    if not ends and spec.has_head:
        notes.append(f"no file of {spec.name} names an end token: answers run until max_tokens or a stop string")
    return msgspec.structs.replace(spec, eos_token_ids=ends, said_by=said_by, notes=tuple(notes), fill_in=facts.fill_in)


def describe_ends(spec: ModelSpec) -> str:
    """The end tokens and who names them, such as `2 (config), 32000 (tokenizer)`."""
    files = {i: spec.said_by.get(f"eos_token_ids.{i}", "") for i in spec.eos_token_ids}
    return ", ".join(f"{i} ({file.removesuffix('.json')})" if file else str(i) for i, file in files.items())
