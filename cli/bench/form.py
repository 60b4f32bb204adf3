"""In which form a bench's requests are sent: what one server refuses of the usual form, no server gets. Pure."""

from dataclasses import dataclass, replace
from typing import Any, Final

from cli.bench.workload import words_of


@dataclass(frozen=True)
class Form:
    """`ignore_eos`: answers go on to their limit, for which OpenAI's API has no field. `as_text`: prompts are texts."""

    ignore_eos: bool = True
    as_text: bool = False

    def body(self, made: dict[str, Any]) -> dict[str, Any]:
        """That of a request which a workload made."""
        if self.as_text and isinstance(made.get("prompt"), list):
            made = made | {"prompt": words_of(made["prompt"])}
        return ({"ignore_eos": True} if self.ignore_eos else {}) | made


@dataclass(frozen=True)
class Refusal:
    """`what` a server refuses, `instead` what a bench does about it, and `do` what its user may."""

    words: str
    changes: dict[str, bool]
    what: str
    instead: str
    do: str


_TEXT: Final = {"as_text": True}
_NO_IDS: Final = (
    _TEXT, "takes no token ids", "texts of about as many tokens are sent",
    "give texts with --prompts FILE, or --endpoint chat",
)  # fmt: skip
_REFUSALS: Final = (
    Refusal(
        "ignore_eos", {"ignore_eos": False}, "does not know ignore_eos", "it is left out, so answers may end early",
        "leave it out for both with --no-ignore-eos",
    ),
    Refusal("prompt must be a string", *_NO_IDS),
    Refusal("Input should be a valid string", *_NO_IDS),
)  # fmt: skip
"""By words of `transformers serve` 5.23, the last by those of pydantic, which many servers check bodies with."""


def refusal_in(kind: str, detail: str) -> Refusal | None:
    """What is refused by a failure of this kind; None if that is not known."""
    if not kind.startswith("status 4"):
        return None
    return next((one for one in _REFUSALS if one.words in detail), None)


def without(form: Form, refusal: Refusal) -> Form | None:
    """The form without what is refused; None if it was not in it."""
    changed = replace(form, **refusal.changes)
    return None if changed == form else changed
