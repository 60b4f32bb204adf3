"""Plants a bug: replaces a method while seeds are run, and finds the first seed that shows it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import _patch, patch  # type: ignore[attr-defined]

MOST_SEEDS = 500

Patches = Sequence[Callable[[], "_patch[Any]"]]


class Bug(NamedTuple):
    """What is planted, and the seed that is known to show it."""

    seed: int
    patches: Patches


def bug(seed: int, *patches: Callable[[], "_patch[Any]"]) -> Bug:
    return Bug(seed, patches)


def nothing(*arguments: Any, **options: Any) -> None:
    return None


def around(owner: Any, name: str, planted: Callable[..., Any]) -> Callable[[], "_patch[Any]"]:
    """Replace the function `owner.name` by `planted`, which takes the one it replaces before the other arguments."""

    def plant() -> "_patch[Any]":
        original = getattr(owner, name)
        return patch.object(owner, name, lambda *arguments, **options: planted(original, *arguments, **options))

    return plant


def first_caught(
    patches: Patches, run_seed: Callable[[int], Any], first: int = 0, most: int = MOST_SEEDS
) -> tuple[int, str] | None:
    """The first seed that fails with these patches, and how; None if none does."""
    for seed in range(first, first + most):
        with ExitStack() as planted:
            for plant in patches:
                planted.enter_context(plant())
            try:
                run_seed(seed)
            except Exception as error:  # noqa: BLE001 - whatever it is: it is seen
                return seed, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
