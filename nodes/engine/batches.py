"""From the arguments of an engine's methods to bodies of routes, a few prompts in each. Pure.

What a body may say, and what is wrong with one, is known to its route alone (`nodes/gateway/surfaces`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import msgspec

from nodes.gateway.admission.named_calls import prompt_names
from nodes.gateway.errors import ApiError, BadRequest

MAX_PROMPTS: Final = 32
"""Of one call. Its prompts share one ask of a tokenizer: 300 of them took a tenth longer in calls of one each."""
_MAX_CHARS: Final = 1 << 20
"""Of one call, characters or ids: a body may have 8 MiB, of which a character takes up to six bytes."""
_OF_EACH: Final = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that may be a list with an entry for each prompt."""
_IDS: Final = "token_ids_logprob"
"""The same, but a list by itself: of each if it is a list of lists."""
_NAME: Final = "rid"
"""One name for all or a list of one for each: each call gets the list of its prompts' own. With one name for all it
would count them anew."""
_NAMED: Final = ("text", "input_ids")
"""Fields of prompts at routes that take such a list."""
_PLACED: Final = (*_NAMED, "documents", _NAME)
"""Lists of which a call has its part; `token_ids_logprob` is the same for all."""


class Batch(NamedTuple):
    """One call: its body, the numbers of its first prompt and of its first sample, and how many it has of each."""

    body: bytes
    first_prompt: int
    first_sample: int
    num_prompts: int
    num_samples: int


class Prompts:
    """All prompts of one `generate`, or what else there is any number of: then `field` is that of texts.

    `is_list`: several prompts were given, or a list with one. Raises BadRequest for lists that do not fit together.
    """

    def __init__(self, prompt: Any, input_ids: Any, fields: Mapping[str, Any], *, field: str = "text") -> None:
        if (prompt is None) == (input_ids is None):
            message = "Give either 'prompt' or 'input_ids', and not both."
            raise BadRequest(message, param="prompt", code="invalid_value")
        self._name = field if input_ids is None else "input_ids"
        given = plain(prompt if input_ids is None else input_ids)
        self.is_list = _is_nested(given) if prompt is None else is_list(given)
        self._prompts: Sequence[Any] = given if self.is_list else [given]
        if self.is_list and not self._prompts:
            param = "prompt" if input_ids is None else "input_ids"
            raise BadRequest(f"'{param}' is empty. Give at least one prompt.", param=param, code="empty_prompt")
        self._fields = {name: value for name, value in fields.items() if value is not None}
        if self._name in self._fields:
            message = f"'{self._name}' cannot be given beside the prompts: it is what they become."
            raise BadRequest(message, param=self._name, code="invalid_value")
        self._of_each = {name: value for name, value in self._fields.items() if self._is_of_each(name, value)}
        self._names = self._names_of_each()
        for name, values in [*self._of_each.items(), (_NAME, self._names)]:
            if values is not None and len(values) != len(self):
                message = f"'{name}' has {len(values)} entries, but there are {len(self)} prompts. Give one for each."
                raise BadRequest(message, param=name, code="invalid_value")

    def __len__(self) -> int:
        return len(self._prompts)

    def num_samples_of(self, number: int) -> int:
        params = self._field("sampling_params", number)
        n = cast("dict[str, Any]", params).get("n") if isinstance(params, dict) else None
        return n if isinstance(n, int) and n > 0 else 1

    def batches(self, most_samples: int, most_prompts: Callable[[], int] = lambda: MAX_PROMPTS) -> Iterator[Batch]:
        """Calls of at most `most_samples` samples, unless a prompt by itself has more, and of at most as many prompts
        as `most_prompts` says when the call is made.
        """
        start = first_sample = 0
        while start < len(self):
            batch = self._batch(start, first_sample, most_samples, min(MAX_PROMPTS, most_prompts()))
            yield batch
            start, first_sample = start + batch.num_prompts, first_sample + batch.num_samples

    def one_by_one(self, batch: Batch) -> Iterator[Batch]:
        """The prompts of a call, each in one of its own."""
        each = batch.num_samples // batch.num_prompts
        for number in range(batch.num_prompts):
            yield self._batch(batch.first_prompt + number, batch.first_sample + number * each, 1, 1)

    def of_each(self, answers: list[Any]) -> Any:
        """What calls were answered with, as `generate` returns it: one answer, or a list of all samples."""
        if not self.is_list:
            return answers[0]
        # A call of one prompt and one sample is answered with that alone.
        each = (cast("list[Any]", answer) if isinstance(answer, list) else [answer] for answer in answers)
        return list(chain.from_iterable(each))

    def _batch(self, start: int, first_sample: int, most_samples: int, most_prompts: int) -> Batch:
        each = samples = self.num_samples_of(start)
        end, chars = start + 1, _size(self._prompts[start])
        # Entries of each make a call of each: fields of a body are for all of its prompts.
        while not self._of_each and end < len(self) and end - start < most_prompts:
            chars += _size(self._prompts[end])
            if samples + each > most_samples or chars > _MAX_CHARS:
                break
            end, samples = end + 1, samples + each
        return Batch(self._body(start, end), start, first_sample, end - start, samples)

    def _body(self, start: int, end: int) -> bytes:
        prompts = list(self._prompts[start:end]) if self.is_list else self._prompts[0]
        fields = {name: self._field(name, start) for name in self._fields}
        if self._names is not None:
            fields[_NAME] = self._names[start:end]
        body = {self._name: prompts} | {name: value for name, value in fields.items() if value is not None}
        return msgspec.json.encode(body, enc_hook=encodable)

    def _field(self, name: str, number: int) -> Any:
        return self._of_each[name][number] if name in self._of_each else self._fields.get(name)

    def _names_of_each(self) -> Sequence[Any] | None:
        """What each prompt is called, if the user says so and the route can be told."""
        name = self._fields.get(_NAME)
        if not self.is_list or self._name not in _NAMED or not isinstance(name, str | list | tuple):
            return None
        return prompt_names(name, len(self)) if isinstance(name, str) else cast("Sequence[Any]", name)

    def _is_of_each(self, name: str, value: Any) -> bool:
        return self.is_list and ((name in _OF_EACH and is_list(value)) or (name == _IDS and _is_nested(value)))


def place_among_all(error: ApiError, first: int) -> None:
    """Have an error of a call name what it is about by its place among all prompts, of which `first` was its first."""
    field, _, place = (error.param or "").partition(".")
    if field in _PLACED and place.isdecimal():
        placed = f"{field}.{first + int(place)}"
        error.message, error.param = error.message.replace(f"'{error.param}'", f"'{placed}'"), placed


def is_list(value: Any) -> bool:
    """Whether it becomes a list in a body."""
    return isinstance(value, list | tuple)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(map(is_list, cast("Sequence[Any]", value)))


def plain(value: Any) -> Any:
    """Arrays and tensors, and lists of them, as lists; anything else as it is."""
    found = _of_array(value)
    return [_of_array(one) for one in cast("Sequence[Any]", found)] if is_list(found) else found


def _of_array(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def encodable(value: Any) -> Any:
    """For JSON: numbers of numpy and the like. Raises BadRequest for what is no data."""
    if (plain := _of_array(value)) is value:
        message = f"A value of type {type(value).__name__} cannot be part of a request. Give it as plain data."
        raise BadRequest(message, code="invalid_value")
    return plain


def _size(prompt: Any) -> int:
    return len(cast("str | list[Any]", prompt)) if isinstance(prompt, str | list) else 0
