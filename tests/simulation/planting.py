"""Plants a bug: replaces a method while seeds are run, and finds the first seed that shows it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from traceback import walk_tb
from typing import Any, NamedTuple
from unittest.mock import _patch, patch  # type: ignore[attr-defined]

MOST_SEEDS = 500

Patches = Sequence[Callable[[], "_patch[Any]"]]
Where = tuple[Any, str, Any]
"""Owner and name of what is replaced, and by what: see `around`."""
_TESTED = ("cli.", "kvstore.", "mesh.", "nodes.")
_broken: list[Exception] = []
"""Raised by what was planted, before it reached the code that it replaces: nobody has seen the bug that was meant."""


class Bug(NamedTuple):
    """What is planted, and the seed that is known to show it."""

    seed: int
    patches: Patches


def bug(seed: int, *where: Where) -> Bug:
    return Bug(seed, [around(*one) for one in where])


def nothing(*arguments: Any, **options: Any) -> None:
    return None


def no_items(*arguments: Any, **options: Any) -> list[Any]:
    return []


def returns(value: Any) -> Callable[..., Any]:
    """To plant a function that returns this, whatever it is given. A list would be shared: see `no_items`."""
    return lambda *_, **__: value


def meanwhile(at: int, name: str, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """To plant the function itself, for which the attribute `name` of its argument `at` is what `value` makes of that.

    Afterwards the attribute is again what it was before the call.
    """

    def planted(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with patch.object(arguments[at], name, value(arguments[at])):
            return original(*arguments, **options)

    return planted


def around(owner: Any, name: str, planted: Any) -> Callable[[], "_patch[Any]"]:
    """Replace the function `owner.name` by `planted`, which takes the one it replaces before the other arguments.

    A constant is replaced by a constant.
    """

    def plant() -> "_patch[Any]":
        original = getattr(owner, name)
        if not callable(original):
            return patch.object(owner, name, planted)

        def replaced(*given: Any, **options: Any) -> Any:
            try:
                return planted(original, *given, **options)
            except (AttributeError, NameError, TypeError, ValueError) as error:
                if not any(
                    frame.f_globals["__name__"].startswith(_TESTED) for frame, _ in walk_tb(error.__traceback__)
                ):
                    _broken.append(error)
                raise

        return patch.object(owner, name, replaced)

    return plant


def first_caught(
    patches: Patches, run_seed: Callable[[int], Any], first: int = 0, most: int = MOST_SEEDS
) -> tuple[int, str] | None:
    """The first seed that fails with these patches, and how; None if none does.

    Raises AssertionError if it fails because what is planted does not fit the code.
    """
    _broken.clear()
    for seed in range(first, first + most):
        with ExitStack() as planted:
            for plant in patches:
                planted.enter_context(plant())
            try:
                run_seed(seed)
            except Exception as error:  # noqa: BLE001 - whatever it is: it is seen
                if _broken:
                    raise AssertionError("what is planted fails by itself: it does not fit the code") from _broken.pop()
                return seed, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
