"""Names are looked up beside the loop, and a look-up that hangs holds nobody up for whom the name is there again."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from mesh.transport import names as module
from mesh.transport.names import Names
from tests.mesh.mesh_under_test import until


class Resolver:
    """Plays `getaddrinfo`: the first `num_hanging` questions wait until `release`, and find nothing then.

    The next `num_absent` find nothing at once, and all after `fail` with its error.
    """

    def __init__(self, num_hanging: int, num_absent: int = 0) -> None:
        self.num_asked = 0
        self.release = threading.Event()
        self._hanging = num_hanging
        self._absent = num_absent
        self._error: int | None = None

    def fail(self, error: int) -> None:
        self._error = error

    def hang(self) -> None:
        self._hanging = self.num_asked + 100

    def __call__(self, name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        self.num_asked += 1
        if self.num_asked <= self._hanging:
            assert self.release.wait(60.0)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        if self.num_asked <= self._hanging + self._absent:
            raise socket.gaierror(socket.EAI_NONAME, f"there is no {name}")
        if self._error is not None:
            raise socket.gaierror(self._error, "as the test wants")
        return [(socket.AF_INET6, 0, 0, "", ("::7", 0)), (socket.AF_INET, 0, 0, "", ("10.0.0.7", 0))]


@pytest.fixture
def resolver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver(*request.param)
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.release.set()


@pytest.mark.parametrize("resolver", [(2,)], indirect=True)
async def test_a_name_that_is_back_is_found_while_earlier_questions_hang(resolver: Resolver) -> None:
    names = Names(asyncio.get_running_loop())
    assert await asyncio.wait_for(names.look_up("decode"), 10.0) == "10.0.0.7"
    assert resolver.num_asked == 3
    # Nor does what was asked before it came back say later that it is not there.
    resolver.release.set()
    assert await asyncio.wait_for(names.look_up("decode"), 10.0) == "10.0.0.7"
    names.close()


@pytest.mark.parametrize("resolver", [(1, 1)], indirect=True)
async def test_an_absent_name_is_said_at_once_by_who_was_asked_last(resolver: Resolver) -> None:
    names = Names(asyncio.get_running_loop())
    with pytest.raises(OSError, match=r"decode cannot be looked up: .*there is no decode"):
        await asyncio.wait_for(names.look_up("decode"), 10.0)
    assert not resolver.release.is_set(), "the first question has no answer yet"
    assert await asyncio.wait_for(names.look_up("decode"), 10.0) == "10.0.0.7"
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_who_asks_meanwhile_shares_the_answer(resolver: Resolver) -> None:
    names = Names(asyncio.get_running_loop())
    first, second = names.look_up("decode"), names.look_up("decode")
    assert first is second
    assert await first == "10.0.0.7"
    assert resolver.num_asked == 1
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_a_known_name_is_dialed_where_it_was_while_no_name_server_answers(resolver: Resolver) -> None:
    names = Names(asyncio.get_running_loop())
    assert await names.look_up("head") == "10.0.0.7"
    resolver.hang()
    for asked in (2, 3):
        assert await asyncio.wait_for(names.look_up("head"), 5.0) == "10.0.0.7"
        assert resolver.num_asked == asked
    assert not resolver.release.is_set()
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_what_is_answered_late_is_what_is_dialed_next(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(asyncio.get_running_loop())
    assert await names.look_up("head") == "10.0.0.7"
    late = threading.Event()

    def answer(*_: object, **__: object) -> list[tuple[object, ...]]:
        assert late.wait(60.0)
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.8", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert await asyncio.wait_for(names.look_up("head"), 5.0) == "10.0.0.7"
    late.set()
    assert await asyncio.wait_for(names.look_up("head"), 5.0) == "10.0.0.8"
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_a_known_name_outlives_a_name_server_out_of_order_and_not_one_that_says_it_is_gone(
    resolver: Resolver,
) -> None:
    names = Names(asyncio.get_running_loop())
    assert await names.look_up("head") == "10.0.0.7"
    resolver.fail(socket.EAI_AGAIN)
    assert await asyncio.wait_for(names.look_up("head"), 5.0) == "10.0.0.7"
    resolver.fail(socket.EAI_NONAME)
    with pytest.raises(OSError, match="head cannot be looked up"):
        await asyncio.wait_for(names.look_up("head"), 5.0)
    names.close()


@pytest.mark.parametrize("resolver", [(100,)], indirect=True)
async def test_a_name_that_nobody_answers_has_as_many_threads_as_may_ask(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_ASKING", 2)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)
    names = Names(asyncio.get_running_loop())
    names.look_up("decode")
    await until(lambda: resolver.num_asked == 2)
    # Five pauses and more, each twice as long as the one before.
    await asyncio.sleep(0.1)
    assert resolver.num_asked == 2
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_where_nobody_answered_is_dialed_last(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(asyncio.get_running_loop())
    for expected in ("10.0.0.7", "::7", "10.0.0.7", "::7"):
        assert await names.look_up("head") == expected
        names.failed("head", expected)
    names.failed("head", "10.0.0.7")
    names.failed("nobody", "10.0.0.7")
    assert await names.look_up("head") == await names.look_up("head") == "::7", "it stays while it does not fail"
    resolver.hang()
    assert await asyncio.wait_for(names.look_up("head"), 5.0) == "::7"
    names.failed("head", "::7")
    assert await asyncio.wait_for(names.look_up("head"), 5.0) == "10.0.0.7", "without a name server, too"
    names.close()


async def test_a_host_that_is_back_is_dialed_at_its_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(asyncio.get_running_loop())
    entries = [(socket.AF_INET, 0, 0, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert await names.look_up("head") == "10.0.0.7"
    entries.append((socket.AF_INET, 0, 0, "", ("10.0.0.8", 0)))
    assert await names.look_up("head") == "10.0.0.8"
    names.close()


@pytest.mark.parametrize("resolver", [(0,)], indirect=True)
async def test_as_many_names_are_remembered_as_may_be(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 2)
    names = Names(asyncio.get_running_loop())
    for name in ("first", "second", "third"):
        await names.look_up(name)
    resolver.fail(socket.EAI_AGAIN)
    assert await asyncio.wait_for(names.look_up("second"), 5.0) == "10.0.0.7"
    with pytest.raises(OSError, match="first cannot be looked up"):
        await asyncio.wait_for(names.look_up("first"), 5.0)
    names.close()
