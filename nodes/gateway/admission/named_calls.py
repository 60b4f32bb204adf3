"""Calls in flight by what their clients call them, so that they can be aborted. Pure.

    rid "r" of one prompt             r
    rid "r" of several prompts        r, and of each prompt r_0, r_1, ...
    rid ["a", "b"] of two prompts     a, b

What this gateway calls the request itself names it as well. A name is its API key's own: two clients may well give
their requests the same one. All samples of a prompt go by the name of the prompt, which is read once for all of them.
"""

from collections.abc import Sequence
from typing import Self

from nodes.gateway.errors import invalid
from nodes.gateway.requests.outputs import Generation


def prompt_names(name: str | Sequence[str], num_prompts: int) -> list[str]:
    """What each prompt of a call is called."""
    if not isinstance(name, str):
        return list(name)
    return [name] if num_prompts == 1 else [f"{name}_{number}" for number in range(num_prompts)]


def check_names(names: Sequence[str], num_prompts: int) -> None:
    """Raise `BadRequest` unless there is a name for each prompt."""
    if len(names) != num_prompts or "" in names:
        raise invalid(f"'rid' must be one name, or a list of one for each of the {num_prompts} prompts.", "rid")


def _prompts_by_name(names: Sequence[str | Sequence[str]], num_prompts: int) -> dict[str, list[int]]:
    """Which prompts each name means; one that is given twice means the prompts of both."""
    if num_prompts == 1 and len(names) == 1 and isinstance(names[0], str):
        # Nearly every call: of one prompt, and without a name of its client's.
        return {names[0]: [0]}
    found: dict[str, dict[int, None]] = {}
    for name in names:
        if isinstance(name, str):
            found.setdefault(name, {}).update(dict.fromkeys(range(num_prompts)))
        for prompt, its in enumerate(prompt_names(name, num_prompts)):
            found.setdefault(its, {})[prompt] = None
    return {name: sorted(prompts) for name, prompts in found.items()}


class NamedCall:
    """One call, from the reading of its body until it is answered."""

    __slots__ = ("_aborted", "_calls", "_num_prompts", "_request_ids", "meant", "owner")

    def __init__(self, calls: "NamedCalls", owner: str, meant: dict[str, list[int]], num_prompts: int) -> None:
        self._calls = calls
        self.owner = owner
        self.meant = meant
        self._num_prompts = num_prompts
        self._request_ids: list[str] | None = None
        self._aborted: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.leave(self)

    def opened(self, generation: Generation) -> list[str]:
        """Its prompts became these requests. Returns those that were aborted before they were."""
        self._request_ids = generation.request_ids
        return [request_id for prompt in sorted(self._aborted) for request_id in self._requests_of(prompt)]

    def abort(self, prompts: Sequence[int] | None = None) -> list[str]:
        """Ids of the requests to be ended now: those of `prompts`, or all."""
        meant = range(self._num_prompts) if prompts is None else prompts
        self._aborted.update(meant)
        return [request_id for prompt in meant for request_id in self._requests_of(prompt)]

    def _requests_of(self, prompt: int) -> list[str]:
        if self._request_ids is None:
            return []
        per_prompt = len(self._request_ids) // self._num_prompts
        return self._request_ids[prompt * per_prompt : (prompt + 1) * per_prompt]


class NamedCalls:
    """All of one gateway. `owner` is the name of an API key, empty without keys."""

    def __init__(self) -> None:
        # An owner's names, with the prompts that each means; insertion-ordered, as sets of calls are not.
        self._by_name: dict[tuple[str, str], dict[NamedCall, list[int]]] = {}
        self._calls: dict[NamedCall, None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def entered(self, owner: str, names: Sequence[str | Sequence[str]], num_prompts: int) -> NamedCall:
        """Within it, as a context, the call can be aborted under each of `names`, one for all of its prompts or one for
        each.
        """
        meant = _prompts_by_name(names, num_prompts)
        call = NamedCall(self, owner, meant, num_prompts)
        self._calls[call] = None
        for name, prompts in meant.items():
            self._by_name.setdefault((owner, name), {})[call] = prompts
        return call

    def leave(self, call: NamedCall) -> None:
        """The call's own, at its end."""
        del self._calls[call]
        for name in call.meant:
            calls = self._by_name[call.owner, name]
            del calls[call]
            if not calls:
                del self._by_name[call.owner, name]

    def abort(self, owner: str, name: str) -> list[str]:
        """Ids of the requests to be ended: those that `owner` calls so. Others' requests of that name are not meant."""
        return [one for call, prompts in self._by_name.get((owner, name), {}).items() for one in call.abort(prompts)]

    def abort_all(self, owner: str | None) -> list[str]:
        """Ids of all requests of an owner, or with None of everybody."""
        return [one for call in self._calls if owner in (None, call.owner) for one in call.abort()]
