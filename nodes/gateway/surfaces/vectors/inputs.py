"""What of a body becomes vectors: its texts, pairs or token ids in their order, each with the name that errors have.

Pure. An input is named by its field and its place, `input.3`; a single text by its field alone.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest, invalid
from nodes.protocol import Prepare, Prepared

_PART_INPUTS: Final = 64
_PART_SIZE: Final = 16_384
"""Characters, or ids, of the inputs that a tokenizer is asked for at once: so many it encodes without a thread, beside
others. What is longer goes by itself, so that an error about it is about one input."""


class Inputs(NamedTuple):
    """Texts, pairs of `texts` and `seconds`, or `token_ids`; fields as in `Prepare`."""

    names: Sequence[str]
    texts: Sequence[str] = ()
    seconds: Sequence[str] | None = None
    token_ids: Sequence[list[int]] = ()
    add_special_tokens: bool = True
    after: str = ""


class Part(NamedTuple):
    """Some inputs that follow each other, as a tokenizer is asked for them."""

    first: int
    names: Sequence[str]
    prepare: Prepare


def inputs_of(field: str, given: str | Sequence[str | int | list[int]], config: GatewayConfig) -> Inputs:
    """Raises `BadRequest` for what is empty, of mixed kinds, too many, or not in the vocabulary."""
    if isinstance(given, str):
        return Inputs(_checked([field], [given]), [given])
    texts = [one for one in given if isinstance(one, str)]
    flat = [one for one in given if isinstance(one, int)]
    lists = [one for one in given if isinstance(one, list)]
    if max(len(texts), len(flat), len(lists)) != len(given):
        message = f"'{field}' must be a text, a list of texts, a list of token ids, or a list of lists of token ids."
        raise invalid(message, field)
    if flat:
        _check_ids(field, flat, config)
        return Inputs([field], token_ids=[flat])
    names = names_of(field, len(given), config)
    if texts:
        return Inputs(_checked(names, texts), texts)
    _checked(names, lists)
    for name, ids in zip(names, lists, strict=True):
        _check_ids(name, ids, config)
    return Inputs(names, token_ids=lists)


def texts_of(field: str, given: str | Sequence[str], config: GatewayConfig) -> tuple[Sequence[str], list[str]]:
    """Names and texts. Raises `BadRequest` for what is empty or too many."""
    if isinstance(given, str):
        return _checked([field], [given]), [given]
    texts = list(given)
    return _checked(names_of(field, len(texts), config), texts), texts


def names_of(field: str, num: int, config: GatewayConfig) -> list[str]:
    """The names of a list. Raises `BadRequest` if it is too long."""
    if num > config.max_inputs_per_call:
        message = f"'{field}' has {num} inputs; at most {config.max_inputs_per_call} can be given in one call."
        raise invalid(message, field)
    return [f"{field}.{index}" for index in range(num)]


def parts_of(inputs: Inputs, prepare: Prepare) -> Iterator[Part]:
    """What to ask a tokenizer; `prepare` has what all inputs have in common. Each part is a request of its own."""
    sizes = [*map(len, inputs.token_ids or inputs.texts)]
    if inputs.seconds is not None:
        sizes = [size + len(second) for size, second in zip(sizes, inputs.seconds, strict=True)]
    begin = 0
    while begin < len(sizes):
        end, total = begin + 1, sizes[begin]
        while end < min(len(sizes), begin + _PART_INPUTS) and total + sizes[end] <= _PART_SIZE:
            total += sizes[end]
            end += 1
        whole = begin == 0 and end == len(sizes)
        asked = replace(
            prepare,
            request_id=prepare.request_id if whole else f"{prepare.request_id}-{begin}",
            texts=list(inputs.texts[begin:end]) if not inputs.token_ids else None,
            token_ids=list(inputs.token_ids[begin:end]) if inputs.token_ids else None,
            seconds=None if inputs.seconds is None else list(inputs.seconds[begin:end]),
            add_special_tokens=inputs.add_special_tokens,
            after=inputs.after,
        )
        yield Part(begin, inputs.names[begin:end], asked)
        begin = end


def check_lengths(part: Part, prepared: Prepared, config: GatewayConfig, advice: str) -> None:
    """Raises `BadRequest` for an input that has no token, or more than the model takes or the request wants."""
    most, wanted = config.longest_input, part.prepare.truncate_to
    for name, ids in zip(part.names, prepared.token_ids, strict=True):
        if not ids:
            raise BadRequest(f"'{name}' has no tokens. Give at least one.", param=name, code="empty_prompt")
        if wanted and len(ids) > wanted:
            # Of a pair in a template: what is around the second text is never cut, and of that one token is left.
            message = (
                f"This model's maximum context length is {most} tokens. '{name}' cannot be cut to {wanted}: the query "
                f"and the template take {len(ids) - 1} without it. Please shorten the query, or allow more tokens."
            )
            raise BadRequest(message, param=name, code="context_length_exceeded")
        if len(ids) > most:
            raise too_long(name, f"{len(ids)} tokens", config, advice)


def too_long(name: str, what: str, config: GatewayConfig, advice: str) -> BadRequest:
    """In OpenAI's words, which clients look for. `advice`: the field that has inputs cut, and its value."""
    message = (
        f"This model's maximum context length is {config.longest_input} tokens. However, '{name}' has {what}. Please "
        f"reduce its length, or send {advice}, which keeps as much of each input as fits."
    )
    return BadRequest(message, param=name, code="context_length_exceeded")


def _checked(names: Sequence[str], given: Sequence[str] | Sequence[list[int]]) -> Sequence[str]:
    for name, one in zip(names, given, strict=True):
        if not one:
            raise BadRequest(f"'{name}' is empty. Leave it out, or give some text.", param=name, code="empty_prompt")
    return names


def _check_ids(name: str, ids: Sequence[int], config: GatewayConfig) -> None:
    if config.vocab_size and max(ids) >= config.vocab_size:
        message = (
            f"Token id {max(ids)} in '{name}' is not in this model's vocabulary of {config.vocab_size} tokens. Ids are "
            "those of the served model's own tokenizer. langchain's OpenAIEmbeddings sends those of OpenAI's unless it "
            "is made with check_embedding_ctx_length=False; then it sends text."
        )
        raise BadRequest(message, param=name, code="invalid_token_id")
