"""What a failed core's events show of prompts and answers in the log: their lengths, and where they are alike.

Each token id is replaced by another one, the same everywhere in one failure, so shared prefixes are still shared and a
stop id still is one. Texts become as many `x`; cache keys become `key-1`, `key-2`, … A reader of the log learns how
long and how repetitive a prompt was, but cannot read it.
"""

from typing import Any, Final, cast

_IDS: Final = frozenset(
    {"eos_token_ids", "output_ids", "prompt_ids", "prompt_tail", "stop_token_ids", "token_id", "token_ids"}
)
_TEXTS: Final = frozenset({"stop", "text", "texts"})


class PromptRedactor:
    """A `mesh.runtime.recording.Redact` for one failure."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._keys: dict[str, str] = {"": ""}

    def __call__(self, field: str, value: Any) -> Any:
        if field in _IDS:
            return self._renamed(value)
        if field in _TEXTS:
            return _covered(value)
        if field == "extra_key":
            return self._keys.setdefault(value, f"key-{len(self._keys)}")
        if field == "logit_bias" and value:
            return {self._renamed(token_id): bias for token_id, bias in cast("dict[int, float]", value).items()}
        return value

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, int):
            # Negative numbers are not ids: nothing was drawn, or it is not known yet.
            return value if value < 0 else self._ids.setdefault(value, len(self._ids))
        if isinstance(value, list | tuple):
            return [self._renamed(item) for item in cast("list[Any]", value)]
        return value


def _covered(value: Any) -> Any:
    if isinstance(value, str):
        return "x" * len(value)
    if isinstance(value, list):
        return [_covered(item) for item in cast("list[Any]", value)]
    return value
