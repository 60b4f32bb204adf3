"""What the simulation watches while a mesh runs, besides its answers: rules whose breach costs a request only time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.protocol import AnnouncePages, OpenGrants, PagesPulled, TransferNews
from kvstore.transfer.session import DEFAULT_LIMITS
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.testing.processes import ProcessState, SimulatedProcess
from nodes.kv_agent.actor import KVAgent


class LateAsks:
    """Notes every ask that outlives its deadline, unless the whole process stood still."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, actor: Actor, process: SimulatedProcess) -> None:
        """Watch all that `actor` asks from now on."""
        ask, ask_then, loop = actor.ctx.ask, actor.ctx.ask_then, asyncio.get_running_loop()

        def begun(to: str, message: Any, timeout_s: float) -> Callable[[], None]:
            deadline, num_stops = loop.time() + timeout_s, process.num_stops

            def ended() -> None:
                stood_still = process.num_stops != num_stops or process.state is not ProcessState.RUNNING
                if loop.time() > deadline + 1e-6 and not stood_still:
                    what = f"{process.name} -> {to} {type(message).__name__}"
                    self.found.append(f"an ask outlived its deadline: {what}")

            return ended

        async def timed(to: str, message: Any, *, timeout_s: float, **options: Any) -> Any:
            ended = begun(to, message, timeout_s)
            try:
                return await ask(to, message, timeout_s=timeout_s, **options)
            finally:
                ended()

        def timed_then(to: str, message: Any, then: Callable[[Any], None], *, timeout_s: float, **options: Any) -> None:
            ended = begun(to, message, timeout_s)

            def both(outcome: Any) -> None:
                ended()
                then(outcome)

            ask_then(to, message, both, timeout_s=timeout_s, **options)

        actor.ctx.ask = timed  # type: ignore[method-assign]
        actor.ctx.ask_then = timed_then  # type: ignore[method-assign]


class Tombstones:
    """Notes every repeated announcement that does not bring its holder the news of a grant that has closed itself.

    The holder has no other way to hear of a success whose one `PagesPulled` was lost; it would give the pages up.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, agent: KVAgent) -> None:
        """Watch all that `agent` tells and is told from now on."""
        tell, on_tell, loop = agent.ctx.tell, agent.on_tell, asyncio.get_running_loop()
        senders: dict[str, Address] = {}
        # By grant: who was told first, which is the holder, and when.
        succeeded: dict[str, tuple[str, float]] = {}

        def telling(to: str, message: Any, *more: Any, **options: Any) -> bool:
            for pulled in message.pulled if isinstance(message, TransferNews) else ():
                if pulled.complete:
                    succeeded.setdefault(pulled.grant_id, (to, loop.time()))
            return tell(to, message, *more, **options)

        def taking(sender: Address, message: Any, buffers: Sequence[Any]) -> None:
            on_tell(sender, message, buffers)
            for ready in message.announced if isinstance(message, AnnouncePages) else ():
                holder, at = succeeded.get(ready.grant_id, ("", 0.0))
                is_due = holder and senders[ready.grant_id] == sender and loop.time() < at + DEFAULT_LIMITS.linger_s
                # What an agent tells leaves it at the end of the turn.
                told = [one.grant_id for one in agent._news.get(holder, ()) if isinstance(one, PagesPulled)]
                if is_due and ready.grant_id not in told:
                    self.found.append(f"{holder} was not told again that grant {ready.grant_id} has all its pages")
                senders.setdefault(ready.grant_id, sender)

        agent.ctx.tell = telling  # type: ignore[method-assign]
        agent.on_tell = taking  # type: ignore[method-assign]


class UnopenedGrants:
    """Notes pages announced for a grant that its agent was asked for and has not opened.

    Such an order comes to nothing and the request is prefilled where it decodes: only the time it takes shows that.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(self, agent: KVAgent) -> None:
        """Watch all that `agent` is asked and told from now on."""
        on_ask, on_tell = agent.on_ask, agent.on_tell
        asked: set[str] = set()
        opened: set[str] = set()

        def asking(call: Call) -> None:
            on_ask(call)
            if isinstance(call.message, OpenGrants):
                asked.update(one.grant_id for one in call.message.grants)
                opened.update(asked & {one.grant.grant_id for one in agent.core.sessions})

        def taking(sender: Address, message: Any, buffers: Sequence[Any]) -> None:
            for ready in message.announced if isinstance(message, AnnouncePages) else ():
                if ready.grant_id in asked - opened:
                    self.found.append(f"pages came for grant {ready.grant_id}, which its agent has not opened")
            on_tell(sender, message, buffers)

        agent.on_ask = asking  # type: ignore[method-assign]
        agent.on_tell = taking  # type: ignore[method-assign]
