"""The asking side of a stream: an async iterator with credit. The sender's side is in `mesh/calls/serving.py`."""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from mesh.calls.asking import Answer, Asking
from mesh.calls.credit import Arrival, CreditWindow
from mesh.errors import MeshError, PeerLost, RemoteError
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import AnyMessage
from mesh.wire.header import Header, Verb


class Stream:
    """Items of one streamed answer, at most `window` of them unread. The call is made when the first item is requested.

    Iterating raises as `Asking.ask` does, at the latest `timeout_s` seconds after that request. Items that arrived
    before an error are delivered before it. Dropping the iterator cancels the call at the peer; so that it can be
    dropped, the table of pending calls does not hold the iterator itself.
    """

    def __init__(
        self,
        asking: Asking,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        window: int = 32,
        buffers: Sequence[Buffer] = (),
        channel: Channel = Channel.DATA,
    ) -> None:
        arrivals = self._arrivals = _Arrivals(asking, window)
        self._open = partial(
            asking.open, arrivals, Verb.STREAM, actor_id, message, timeout_s, buffers, channel, credit=window
        )

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Answer:
        arrivals = self._arrivals
        if not arrivals.message_id and not arrivals.over:
            arrivals.message_id = self._open()
        return await arrivals.take()

    async def aclose(self) -> None:
        """Take no more items, and tell the peer. Idempotent."""
        self._arrivals.close()

    def __del__(self) -> None:
        self._arrivals.close()


class _Arrivals:
    """Items of a stream that have arrived but are not read yet; implements `mesh.calls.asking.Asked`."""

    __slots__ = ("_asking", "_error", "_items", "_waiter", "_window", "message_id", "over")

    def __init__(self, asking: Asking, window: int) -> None:
        self.message_id = 0
        self.over = False
        self._asking = asking
        self._window = CreditWindow(window)
        self._items: deque[Answer] = deque()
        self._error: MeshError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> Answer:
        """The next item, as `__anext__` returns it."""
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        limit = self._window.consume()
        if limit is not None and not self.over:
            self._asking.grant(self.message_id, limit)
        return self._items.popleft()

    def close(self) -> None:
        """The reader is gone: drop what has arrived, and cancel the call."""
        self._items.clear()
        self._error = None
        if not self.over:
            self.over = True
            if self.message_id:
                self._asking.abandon(self.message_id, "the stream is no longer being read")

    def arrived(self, header: Header, answer: Answer) -> bool:
        """An item arrived, or a single reply where a stream was expected."""
        if header.verb != Verb.ITEM:
            self.failed(RemoteError("bad_answer", "a stream was expected, but one reply came"))
            return True
        arrival = self._window.receive(header.position)
        if arrival is Arrival.NEXT:
            self._items.append(answer)
            self._wake()
        elif arrival is not Arrival.REPEAT:
            fault = "items were lost" if arrival is Arrival.GAP else "an item arrived without credit"
            self._asking.abandon(self.message_id, fault)
            self.failed(PeerLost(f"the stream from {answer.sender} broke: {fault}"))
        return False

    def ended(self, header: Header) -> None:
        """The sender has sent all items; their number shows whether all have arrived."""
        if header.position != self._window.received:
            self.failed(PeerLost(f"the stream from {header.sender} broke: the last items were lost"))
            return
        self.over = True
        self._wake()

    def failed(self, error: MeshError) -> None:
        """Nothing more comes."""
        if not self.over:
            self.over, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
