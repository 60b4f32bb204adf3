"""Asks that are repeated until they are answered, over a context whose answers are given."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError, RemoteError, Unreachable
from mesh.wire.frames import Ping


class GivenAnswers:
    """As much of a context as asking needs. An answer that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_asked = 0
        self.asked = asyncio.Event()
        self.time = 0.0
        self.told: list[str] = []
        self.log = SimpleNamespace(info=lambda _, **fields: self.told.append(fields["why"]))

    def now(self) -> float:
        return self.time

    async def ask(self, actor_id: str, message: Any, *, timeout_s: float) -> Any:
        self.num_asked += 1
        self.asked.set()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(message=answer)


def asking(persistent: PersistentAsk, ctx: GivenAnswers) -> asyncio.Task:
    asked: Any = ctx
    return asyncio.create_task(persistent.ask(asked, "peer", Ping(), timeout_s=1.0, what="it"))


async def test_a_change_of_members_is_worth_a_try_at_once() -> None:
    persistent, ctx = PersistentAsk(retry_s=3600.0), GivenAnswers(Unreachable("peer"), "here")
    task = asking(persistent, ctx)
    await ctx.asked.wait()
    await asyncio.sleep(0)
    assert not task.done()
    persistent.members_changed()
    assert await asyncio.wait_for(task, 5) == "here"


async def test_a_change_that_was_there_before_the_ask_is_no_news() -> None:
    persistent, ctx = PersistentAsk(retry_s=3600.0), GivenAnswers(Unreachable("peer"), "here")
    persistent.members_changed()
    task = asking(persistent, ctx)
    await ctx.asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert ctx.num_asked == 1
    task.cancel()


async def test_it_tries_again_after_a_while_and_gives_up_where_no_try_can_help() -> None:
    ctx = GivenAnswers(Unreachable("peer"), Unreachable("peer"), RemoteError("unknown_group", "no such group"))
    with pytest.raises(RemoteError, match="unknown_group"):
        await asyncio.wait_for(asking(PersistentAsk(retry_s=0.001), ctx), 5)
    assert ctx.num_asked == 3


async def test_what_takes_seconds_is_told_once_for_each_reason_and_a_moment_is_not_told() -> None:
    slow, loading = Unreachable("not here"), RemoteError("not_ready", "it is being loaded", retryable=True)
    ctx = GivenAnswers(slow, slow, slow, loading, loading, "here")
    refused: list[str] = []

    def later(error: Any) -> None:
        refused.append(error.code)
        ctx.time += 1.5

    persistent, given = PersistentAsk(retry_s=0.001), ctx
    asked: Any = given
    assert await persistent.ask(asked, "peer", Ping(), timeout_s=1.0, what="it", refused=later) == "here"
    assert len(refused) == 5
    assert ctx.told == ["unreachable: not here", "not_ready: it is being loaded"]


async def test_a_change_while_one_asks_is_not_lost_to_another_that_begins_to_ask() -> None:
    persistent, slow, quick = PersistentAsk(retry_s=3600.0), GivenAnswers("here"), GivenAnswers("here")
    refused = asyncio.Event()
    answer = slow.ask

    async def refuse_once(*_: Any, **__: Any) -> Any:
        slow.ask = answer
        slow.asked.set()
        await refused.wait()
        raise Unreachable("peer")

    slow.ask = refuse_once
    first = asking(persistent, slow)
    await slow.asked.wait()
    persistent.members_changed()
    assert await asking(persistent, quick) == "here"
    refused.set()
    assert await asyncio.wait_for(first, 5) == "here"


class Role:
    """A context whose actors answer as `answers` says: an error is raised, anything else returned."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []
        self.members = self

    def by_role(self, role):
        assert role == "r"
        return [SimpleNamespace(actor_id=actor_id) for actor_id in self.answers]

    def now(self):
        return asyncio.get_running_loop().time()

    async def ask(self, actor_id, message, *, timeout_s):
        self.asked.append(actor_id)
        answer = self.answers[actor_id]
        if isinstance(answer, CallError):
            raise answer
        return SimpleNamespace(message=answer)


def refusal(code, *, retryable=False):
    return RemoteError(code, "as told", retryable)


def outcome(answers, patience_s=0.0):
    async def main():
        context = Role(answers)
        try:
            asking = PersistentAsk().ask_any(context, "r", "?", timeout_s=1.0, patience_s=patience_s)
            answer = (await asking).message
        except CallError as error:
            answer = error.code
        return answer, sorted(context.asked)

    return asyncio.run(main())


@pytest.mark.parametrize("first", [refusal("not_served"), refusal("overloaded", retryable=True)])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_another_of_the_role_is_asked(first, order):
    answers = {"a": first, "b": "yes"}
    assert outcome({name: answers[name] for name in order})[0] == "yes"


def test_a_refusal_for_good_is_the_answer():
    assert outcome({"a": refusal("bad_prompt"), "b": refusal("bad_prompt")})[0] == "bad_prompt"


def test_not_served_by_all_is_an_error_at_once():
    assert outcome({"a": refusal("not_served"), "b": refusal("not_served")}, 60.0) == ("not_served", ["a", "b"])


def test_where_some_do_not_serve_it_and_others_cannot_now_the_others_are_waited_for():
    answers = {"a": refusal("not_served"), "b": refusal("overloaded", retryable=True)}
    code, asked = outcome(answers, 0.5)
    assert code == "overloaded"
    assert len(asked) > 2


def test_nobody_there():
    assert outcome({}) == ("no_r", [])
