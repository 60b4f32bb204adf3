"""Families of conversations in which tools are on offer: one call, two, none, a tool that is not there, results.

Any subset of the six tools is offered, in any order. Pure Python; used by the grammar.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from tools.tiny_model.conversation import Message, Tool, answer_of
from tools.tiny_model.requests import NO_TOOL, SERVICES, Request, Service, pair
from tools.tiny_model.turns import Turn, is_held_out, vary

TOOL_FAMILIES: Final[dict[str, float]] = {
    "call": 6.0,
    "call_two": 7.0,
    "call_none": 3.0,
    "call_missing": 7.0,
    "call_result": 4.0,
    "call_two_results": 5.0,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question while tools are offered; without requests its answer is ``answer``. ``key`` as in ``Turn``."""

    question: str
    requests: tuple[Request, ...]
    answer: str
    key: str | None

    def exchange(self) -> list[Message]:
        """The question with everything up to the last answer."""
        return [*self.opening(), Message("assistant", self.last_answer())]

    def opening(self) -> list[Message]:
        """The question, and the calls with their results if there are any."""
        messages = [Message("user", self.question)]
        if self.requests:
            messages.append(Message("assistant", "", tuple(request.call for request in self.requests)))
        return messages + [Message("tool", request.result) for request in self.requests]

    def first_answer(self) -> str:
        """The calls, or the answer if there are none."""
        return answer_of(tuple(request.call for request in self.requests)) if self.requests else self.answer

    def last_answer(self) -> str:
        """What is said when all results are there."""
        return "\n".join(request.answer() for request in self.requests) if self.requests else self.answer


@dataclass(frozen=True, slots=True)
class Offer:
    """The services whose tools are on offer, in their order, and those that are not."""

    offered: tuple[Service, ...]
    missing: tuple[Service, ...]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the client sends."""
        return tuple(service.tool for service in self.offered)

    def ask(self, rng: Random, family: str, ordinary: Callable[[Random], Turn]) -> Asked:
        """A question of a family; ``ordinary`` draws one that needs no tool."""
        if family == "call_none":
            turn = ordinary(rng)
            return Asked(turn.user, (), turn.answer, turn.key)
        if family == "call_missing":
            question = rng.choice(self.missing).request(rng).question
            return Asked(vary(rng, question), (), NO_TOOL, f"call:{question}")
        if family in ("call_two", "call_two_results"):
            question, requests = pair(rng, rng.choice(self.offered), rng.choice(self.offered))
            return Asked(question, requests, "", f"call:{question}")
        request = rng.choice(self.offered).request(rng)
        return Asked(vary(rng, request.question), (request,), "", f"call:{request.question}")

    def training_exchange(self, rng: Random, ordinary: Callable[[Random], Turn]) -> list[Message]:
        """Any question that is not held out, with its answer."""
        while True:
            family = rng.choices(("call", "call_two", "call_none", "call_missing"), (6, 2, 2, 1))[0]
            if family == "call_missing" and not self.missing:
                continue
            asked = self.ask(rng, family, ordinary)
            if not is_held_out(asked.key):
                return asked.exchange()


def offer(rng: Random, family: str) -> Offer:
    """One to six tools in any order; a family that needs a missing one leaves one out, or all."""
    services = rng.sample(SERVICES, len(SERVICES))
    fewest, most = (0, len(SERVICES) - 1) if family == "call_missing" else (1, len(SERVICES))
    count = rng.randint(fewest, most)
    return Offer(tuple(services[:count]), tuple(services[count:]))
