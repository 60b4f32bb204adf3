"""Asks that are repeated until they are answered, over a context whose answers are given."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import RemoteError, Unreachable
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


def test_a_change_of_members_is_worth_a_try_at_once() -> None:
    async def main() -> None:
        persistent, ctx = PersistentAsk(retry_s=3600.0), GivenAnswers(Unreachable("peer"), "here")
        task = asking(persistent, ctx)
        await ctx.asked.wait()
        await asyncio.sleep(0)
        assert not task.done()
        persistent.members_changed()
        assert await asyncio.wait_for(task, 5) == "here"

    asyncio.run(main())


def test_a_change_that_was_there_before_the_ask_is_no_news() -> None:
    async def main() -> None:
        persistent, ctx = PersistentAsk(retry_s=3600.0), GivenAnswers(Unreachable("peer"), "here")
        persistent.members_changed()
        task = asking(persistent, ctx)
        await ctx.asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ctx.num_asked == 1
        task.cancel()

    asyncio.run(main())


def test_it_tries_again_after_a_while_and_gives_up_where_no_try_can_help() -> None:
    async def main() -> None:
        ctx = GivenAnswers(Unreachable("peer"), Unreachable("peer"), RemoteError("unknown_group", "no such group"))
        with pytest.raises(RemoteError, match="unknown_group"):
            await asyncio.wait_for(asking(PersistentAsk(retry_s=0.001), ctx), 5)
        assert ctx.num_asked == 3

    asyncio.run(main())


def test_what_takes_seconds_is_told_once_for_each_reason_and_a_moment_is_not_told() -> None:
    async def main() -> None:
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

    asyncio.run(main())
