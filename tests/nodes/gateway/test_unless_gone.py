"""Waiting for a tokenizer in a call's own task, which its client or the gateway may end."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodes.gateway.calls.job_endpoint import JobEndpoint
from nodes.gateway.errors import Unavailable
from nodes.gateway.http.call import ClientLeft


def waiting() -> tuple[Any, "asyncio.Future[None]", "asyncio.Future[None]", "asyncio.Future[str]"]:
    """An endpoint's wait, the client's end, the gateway's, and what is waited for."""
    loop = asyncio.get_running_loop()
    watcher, stopping, answer = loop.create_future(), loop.create_future(), loop.create_future()
    service = SimpleNamespace(
        stopping=stopping, error_of=lambda failure, _: Unavailable(failure.message, code=failure.code, retry_after_s=1)
    )
    endpoint = cast("Any", SimpleNamespace(_service=service))

    async def wait() -> str:
        return await answer

    return lambda: JobEndpoint._unless_gone(endpoint, wait(), watcher), watcher, stopping, answer


async def test_what_is_waited_for_comes() -> None:
    unless_gone, watcher, stopping, answer = waiting()
    task = asyncio.ensure_future(unless_gone())
    await asyncio.sleep(0)
    answer.set_result("ids")
    assert await task == "ids"
    # Whoever ends later ends nothing here: the task goes on with other things.
    watcher.set_result(None)
    stopping.set_result(None)
    await asyncio.sleep(0)


async def test_the_client_leaves() -> None:
    unless_gone, watcher, stopping, answer = waiting()
    num_cancels = -1

    async def call() -> None:
        nonlocal num_cancels
        try:
            await unless_gone()
        finally:
            task = asyncio.current_task()
            assert task is not None
            num_cancels = task.cancelling()
            # It can wait on, to say what happened.
            await asyncio.sleep(0)

    task = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    watcher.set_result(None)
    stopping.set_result(None)
    with pytest.raises(ClientLeft):
        await task
    assert (num_cancels, task.cancelled()) == (0, False)
    assert answer.cancelled(), "nobody waits for it any more"


@pytest.mark.parametrize("answer_first", [False, True])
async def test_the_client_leaves_in_the_turn_of_the_answer(answer_first: bool) -> None:
    unless_gone, watcher, _, answer = waiting()

    async def call() -> str:
        ids = await unless_gone()
        # What follows is not interrupted for something that is over.
        await asyncio.sleep(0)
        return ids

    task = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    if answer_first:
        answer.set_result("ids")
    watcher.set_result(None)
    if not answer_first:
        answer.set_result("ids")
    if answer_first:
        assert await task == "ids"
    else:
        with pytest.raises(ClientLeft):
            await task


async def test_the_client_has_left_before() -> None:
    unless_gone, watcher, *_ = waiting()
    watcher.set_result(None)
    coroutine = unless_gone()
    with pytest.raises(ClientLeft):
        await coroutine


async def test_the_gateway_stops() -> None:
    unless_gone, _, stopping, _ = waiting()
    task = asyncio.ensure_future(unless_gone())
    await asyncio.sleep(0)
    stopping.set_result(None)
    with pytest.raises(Unavailable, match="shutting down"):
        await task


@pytest.mark.parametrize("with_client", [False, True])
async def test_who_cancels_the_call_means_all_of_it(with_client: bool) -> None:
    unless_gone, watcher, *_ = waiting()
    task = asyncio.ensure_future(unless_gone())
    await asyncio.sleep(0)
    if with_client:
        watcher.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
