import asyncio
import threading
import time

import pytest

from mesh.simulation.virtual_time import (
    Deadlock,
    Livelock,
    RealWorld,
    TimeLimit,
    UnhandledErrors,
    VirtualTimeLoop,
    run,
)


def test_clock_jumps_and_timers_fire_in_order():
    fired = []

    async def main():
        loop = asyncio.get_running_loop()
        for delay in (3600.0, 0.1, 0.3, 0.2):
            loop.call_later(delay, fired.append, delay)
        await asyncio.sleep(86_000)
        return loop.time()

    began = time.monotonic()
    assert run(main()) == pytest.approx(86_000)
    assert time.monotonic() - began < 1
    assert fired == [0.1, 0.2, 0.3, 3600.0]


def test_timeouts_work():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(5)


def test_deadlock_names_who_waits():
    async def stuck():
        await asyncio.Event().wait()

    async def main():
        await asyncio.create_task(stuck(), name="worker-0")

    with pytest.raises(Deadlock, match=r"worker-0 at .*stuck"):
        run(main())


def test_time_limit_ends_a_program_that_only_beats():
    async def main():
        while True:
            await asyncio.sleep(0.5)

    with pytest.raises(TimeLimit, match="limit of 60"):
        run(main(), limit_s=60)


def test_livelock_is_noticed():
    async def main():
        while True:
            await asyncio.sleep(0)

    loop = VirtualTimeLoop(steps_per_instant=100)
    task = loop.create_task(main())
    with pytest.raises(Livelock):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_threads_are_refused_or_inline():
    async def main():
        return await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)

    with pytest.raises(RealWorld):
        run(main())
    assert run(main(), inline_executor=True) == threading.get_ident()

    async def failing():
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 / 0)

    run(failing(), inline_executor=True)


def test_another_thread_may_not_call_in():
    async def main():
        loop = asyncio.get_running_loop()
        caught = []

        def intrude():
            try:
                loop.call_soon_threadsafe(print)
            except RealWorld as error:
                caught.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        done = asyncio.Event()
        loop.call_soon_threadsafe(done.set)
        await done.wait()
        return caught

    assert len(run(main())) == 1


def test_unhandled_errors_fail_the_run():
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(UnhandledErrors, match="ZeroDivisionError") as caught:
        run(main())
    assert isinstance(caught.value.errors[0], ZeroDivisionError)


def test_an_error_of_main_comes_first_with_the_others_as_a_note():
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run(main())
    assert "ZeroDivisionError" in caught.value.__notes__[0]


def test_sets_of_tasks_iterate_alike_in_each_run():
    async def sleeper():
        await asyncio.sleep(1)

    async def main():
        tasks = {asyncio.create_task(sleeper()) for _ in range(50)}
        order = [task.get_name() for task in tasks]
        await asyncio.wait(tasks)
        return order

    assert run(main()) == run(main())
