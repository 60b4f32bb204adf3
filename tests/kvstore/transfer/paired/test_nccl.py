"""One half of a communicator over a stand-in for CuPy's NCCL: what it calls in which thread, and what comes back."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import DeviceUnavailable
from kvstore.pool.device import DevicePages
from kvstore.transfer.paired import nccl as nccl_link
from kvstore.transfer.paired.link import Broken, Moved, Ready, Stopped
from kvstore.transfer.paired.nccl import NcclLinks
from tests.kvstore.fake_devices import CUDARuntimeError
from tests.kvstore.transfer.paired.links import until, wait_for

PAGES = DevicePages(3, 0x10000, 4096)


class Library:
    """Stand-in for `cupy` and `cupy.cuda.nccl`, as of CuPy 14.2; keeps what was called, and in which thread."""

    NCCL_INT8 = 0
    available = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.init_blocks = threading.Event()
        self.init_blocks.set()
        self.event_status = 0
        self.send_error = ""
        self.async_error = ""
        library = self

        class NcclCommunicator:
            def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
                library.call("init", (ndev, commId, rank))
                assert library.init_blocks.wait(10)
                if library.async_error == "aborted":
                    raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR")

            def send(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
                library.call("send", (pointer, count, datatype, peer, stream))
                if library.send_error:
                    raise RuntimeError(library.send_error)

            def recv(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
                library.call("recv", (pointer, count, datatype, peer, stream))

            def abort(self) -> None:
                library.call("abort", None)
                library.async_error = library.async_error or "aborted"
                library.init_blocks.set()

            def check_async_error(self) -> None:
                if library.async_error:
                    raise RuntimeError(library.async_error)

        self.NcclCommunicator = NcclCommunicator
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            setDevice=lambda device: self.call("setDevice", device),
            malloc=lambda size: 0x500,
            eventQuery=lambda event: self.event_status,
        )
        stream = SimpleNamespace(
            ptr=7,
            record=lambda event: self.call("record", event.ptr),
            synchronize=lambda: self.call("synchronize", None),
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, Stream=lambda non_blocking: stream, Event=lambda disable_timing: SimpleNamespace(ptr=8)
        )

    def call(self, name: str, arguments: Any) -> None:
        self.calls.append((name, threading.current_thread().name, arguments))

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def groupStart(self) -> None:
        self.call("groupStart", None)

    def groupEnd(self) -> None:
        self.call("groupEnd", None)

    def named(self, *names: str) -> list[tuple[str, str, Any]]:
        return [call for call in self.calls if call[0] in names]


@pytest.fixture
def links(library: Library) -> Iterator[NcclLinks]:
    links = NcclLinks()
    yield links
    links.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    modules = {"cupy": library, "cupy.cuda.nccl": library}
    monkeypatch.setattr(nccl_link, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    return library


@pytest.mark.parametrize(("rank", "operation"), [(0, "recv"), (1, "send")])
def test_a_half_is_made_warmed_and_moves_in_the_devices_thread(
    library: Library, links: NcclLinks, rank: int, operation: str
) -> None:
    link = links.link("cuda:3", links.unique_id(), rank)
    link.begin()
    assert until(link, bool) == [Ready()]
    [(_, thread, arguments)] = library.named("init")
    assert (thread, arguments) == ("nccl-init-3", (2, bytes(128), rank))
    assert library.named(operation)[0][2] == (0x500, 256, 0, 1 - rank, 7), "connected before it is used"
    library.calls.clear()
    library.event_status = 600
    link.move(5, PAGES, [(10, 100), (20, 200)])
    wait_for(lambda: library.named("record"))
    assert [name for name, _, _ in library.calls if name != "setDevice"] == [
        "groupStart",
        operation,
        operation,
        "groupEnd",
        "record",
    ]
    assert {thread for name, thread, _ in library.calls if name == operation} == {"nccl-3_0"}
    assert link.news() == []
    library.event_status = 0
    assert until(link, bool) == [Moved(5)]


def test_an_abort_reaches_a_communicator_that_is_still_being_made(library: Library, links: NcclLinks) -> None:
    library.init_blocks.clear()
    link = links.link("cuda:0", links.unique_id(), 0)
    link.begin()
    wait_for(lambda: library.named("init"))
    assert link.news() == []
    link.abort()
    found = until(link, lambda found: len(found) == 2)
    assert Stopped() in found
    assert any(isinstance(news, Broken) for news in found)
    link.move(1, PAGES, [(1, 1)])
    later = links.link("cuda:0", links.unique_id(), 0)
    later.begin()
    assert until(later, bool), "which waits behind it in the device's thread"
    assert not library.named("recv"), "nothing begins after an abort"


def test_what_the_engine_says_of_its_failures(library: Library, links: NcclLinks) -> None:
    link = links.link("cuda:0", links.unique_id(), 1)
    link.begin()
    until(link, bool)
    library.send_error = "NCCL_ERROR_INVALID_ARGUMENT"
    link.move(1, PAGES, [(1, 1)])
    assert until(link, bool) == [Broken("moving pages failed: NCCL_ERROR_INVALID_ARGUMENT")]
    assert library.calls[-1][0] == "groupEnd", "a group that was begun is ended"
    library.send_error, library.event_status = "", 600
    link.move(2, PAGES, [(1, 1)])
    library.async_error = "NCCL_ERROR_REMOTE_ERROR"
    assert until(link, bool) == [Broken("NCCL_ERROR_REMOTE_ERROR")]
    library.async_error, library.event_status = "", 700
    link.move(3, PAGES, [(1, 1)])
    assert until(link, bool) == [Broken("cudaError700: text")]
    link.stop()
    assert until(link, bool) == [Stopped()]


def test_without_nccl_the_error_says_what_to_install(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.available = False
    with pytest.raises(DeviceUnavailable, match="nvidia-nccl"):
        NcclLinks().unique_id()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(nccl_link, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(DeviceUnavailable, match=r"kvmesh\[cuda13\]"):
        NcclLinks().unique_id()
