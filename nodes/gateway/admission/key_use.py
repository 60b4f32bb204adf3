"""How much each API key has at work at this gateway, and whether it may have more. Pure.

A key's limits are for the whole mesh, and each gateway grants its share of them: a quarter if there are four. It grants
one call at a time in any case, so that a limit below the number of gateways leaves none of them useless.

Tokens at work are those of prompts and of output so far: what calls take of KV pages. Output grows after a call was
taken, so a key may exceed its limit by what its running calls still write.
"""

from collections.abc import Callable, Sequence

from nodes.api_keys.entries import ApiKey
from nodes.gateway.errors import TooManyRequests
from nodes.gateway.requests.outputs import Generation


class _AtWork:
    __slots__ = ("generations", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        self.generations: list[Generation] = []

    @property
    def num_tokens(self) -> int:
        return sum(_tokens_of(generation) for generation in self.generations)


class KeyUse:
    """Calls and tokens at work by key. `num_gateways` says over how many gateways limits are divided now."""

    def __init__(self, num_gateways: Callable[[], int], *, retry_after_s: int) -> None:
        self._num_gateways = num_gateways
        self._retry_after_s = retry_after_s
        self._at_work: dict[str, _AtWork] = {}

    def __len__(self) -> int:
        """How many keys have calls at work."""
        return len(self._at_work)

    def enter(self, key: ApiKey) -> None:
        """A call begins. Raises TooManyRequests."""
        at_work = self._at_work.get(key.name)
        if key.requests and at_work is not None and at_work.num_calls >= self._share(key.requests):
            raise self._refused(key, "requests", at_work.num_calls, key.requests)
        self._at_work.setdefault(key.name, _AtWork()).num_calls += 1

    def leave(self, key: ApiKey) -> None:
        at_work = self._at_work[key.name]
        at_work.num_calls -= 1
        if not at_work.num_calls:
            # Keys come and go with their file: forget those without calls.
            del self._at_work[key.name]

    def check_tokens(self, key: ApiKey, prompts: Sequence[Sequence[int]]) -> None:
        """Whether a call that has entered may have these prompts computed. Raises TooManyRequests."""
        if not key.tokens:
            return
        num_new, at_work = sum(map(len, prompts)), self._at_work[key.name].num_tokens
        if num_new > key.tokens:
            message = f"The prompt has {num_new} tokens; the API key '{key.name}' may have {key.tokens} at work."
            # Nothing that ends meanwhile makes room for it.
            raise TooManyRequests(message, code="rate_limit_exceeded")
        if at_work and at_work + num_new > self._share(key.tokens):
            raise self._refused(key, "tokens", at_work, key.tokens)

    def begin(self, key: ApiKey, generation: Generation) -> None:
        """Until `end`, the tokens of `generation` are at work."""
        if key.tokens:
            self._at_work[key.name].generations.append(generation)

    def end(self, key: ApiKey, generation: Generation) -> None:
        if key.tokens:
            self._at_work[key.name].generations.remove(generation)

    def _share(self, most: int) -> int:
        return max(1, most // self._num_gateways())

    def _refused(self, key: ApiKey, what: str, at_work: int, most: int) -> TooManyRequests:
        num, share = self._num_gateways(), self._share(most)
        of_mesh = f", of {most} over {num} gateways" if num > 1 else ""
        message = f"The API key '{key.name}' has {at_work} {what} at work here; its limit is {share}{of_mesh}."
        return TooManyRequests(message, code="rate_limit_exceeded", retry_after_s=self._retry_after_s)


def _tokens_of(generation: Generation) -> int:
    """Each prompt counts once: its samples share its pages."""
    prompts = generation.num_prompt_tokens[:: generation.samples_per_prompt]
    return sum(prompts) + sum(sample.num_tokens for sample in generation.output.samples)
