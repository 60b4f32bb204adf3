"""What goes wrong between two agents of a pair is told to the transport, whoever said it."""

import asyncio
from typing import Any

import pytest

from kvstore.protocol import ClosePair, OfferPair, PagesSent, PairAccepted, SendPages
from mesh.errors import RemoteError
from nodes.kv_agent.control_channel import MeshChannel

OFFER = OfferPair(
    pair="p1", unique_id=b"", group="p", incarnation=1, layout_digest=b"", timeout_s=1.0, transport="tcp"
)  # fmt: skip
ORDER = SendPages(
    pair="p1", number=1, group="p", incarnation=1, offsets=[0], sizes=[4], pages=[1], generations=[1], timeout_s=1.0
)  # fmt: skip
SENT = PagesSent(pair="p1", number=1, is_sent=True, code="", message="")


class Recorded:
    """An actor, its context and a transport, all three; `answer` is what asks come to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.ctx = self
        self.heard: list[tuple[Any, ...]] = []
        self.channel = MeshChannel(self, lambda: self.heard.append(("wake",)))
        self.channel.attach(self)
        self.message = answer

    def spawn(self, work: Any, name: str) -> None:
        asyncio.run(work)

    async def ask(self, _agent: str, _message: Any, *, timeout_s: float) -> Any:
        assert timeout_s == 1.0
        if isinstance(self.answer, Exception):
            raise self.answer
        return self

    def pair_failed(self, pair: str, code: str, why: str) -> None:
        self.heard.append((pair, code, why))

    def sent(self, answer: PagesSent) -> None:
        self.heard.append(("sent", answer))

    def tell(self, agent: str, message: Any) -> None:
        self.heard.append((agent, message))


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (SENT, ("sent", SENT)),
        (PairAccepted(pair="p1"), ("p1", "bad_answer", "far answered SendPages with PairAccepted")),
        (RemoteError("busy", "not now"), ("p1", "busy", "far did not send: not now")),
    ],
)
def test_orders(answer: Any, heard: Any) -> None:
    recorded = Recorded(answer)
    recorded.channel.order("far", ORDER)
    assert recorded.heard == [heard, ("wake",)]


def test_offers() -> None:
    recorded = Recorded(PairAccepted(pair="p1"))
    recorded.channel.offer("far", OFFER)
    recorded.channel.close("far", "p1")
    assert recorded.heard == [("wake",), ("far", ClosePair(pair="p1"))]
    recorded = Recorded(RemoteError("unknown_group", "no such pool"))
    recorded.channel.offer("far", OFFER)
    assert recorded.heard == [("p1", "unknown_group", "no pair with far: no such pool"), ("wake",)]
