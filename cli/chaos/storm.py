"""A storm over a running mesh: clients that ask without a pause, and blows that fall meanwhile."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from cli.bench.answer import Misdeed
from cli.bench.client import Server, get
from cli.chaos.answer import Answer
from cli.chaos.asked import Asked
from cli.chaos.blows import Blow, Blows
from cli.chaos.clients import Clients, undisturbed
from cli.chaos.held import held, samples
from cli.chaos.report import Fallen, Seen, deaths, unsettled, why_no_promise
from cli.chaos.striker import Striker, Struck
from cli.client import Ask
from cli.errors import CliError, NotRunning
from cli.protocol import ActorList, ActorStatus, ListActors
from nodes.roles import GATEWAY

_LOOK_S: Final = 0.2
"""A look is one ask of a supervisor, and recoveries are measured to a tenth of what they take."""
_SETTLE_S: Final = 120.0
"""For the last blow to be recovered from: actors that load a large model take minutes."""
_FIRST_S: Final = 30.0
"""For a mesh to be ready before the first blow; one that is not has other troubles."""
_RELEASE_S: Final = 20.0
"""For what was held of requests that are over: schedulers take back what a dead peer had after seconds."""
_SCRAPE_S: Final = 5.0
"""A page of metrics takes milliseconds."""

T = TypeVar("T")


class Storm:
    """`ask` asks the mesh's supervisor, which is there as long as it `lives`. `say` gets each blow when the mesh has
    settled after it.

    When `run` has returned, also early, nothing is stopped any more, and `seen` has what became of everything.
    """

    def __init__(
        self,
        ask: Ask,
        lives: Callable[[], bool],
        server: Server,
        asked: Asked,
        blows: Blows,
        striker: Striker,
        *,
        num_clients: int,
        timeout_s: float,
        say: Callable[[Fallen], object],
    ) -> None:
        self.began_s = time.monotonic()
        self._ask = ask
        self._lives = lives
        self._server = server
        self._asked = asked
        self._blows = blows
        self._striker = striker
        self._num_clients = num_clients
        self._timeout_s = timeout_s
        self._say = say
        self._is_over = asyncio.Event()
        self._fallen: list[Fallen] = []
        self._clients: Clients | None = None
        self._before: Sequence[ActorStatus] = ()
        self._after: Sequence[ActorStatus] = ()
        self._ended_s = 0.0
        self._no_promise = self._unsettled = ""
        self._held: Mapping[str, float] = {}

    def interrupt(self) -> None:
        """End it now: open requests are broken off, and nothing is waited for."""
        self._is_over.set()

    async def run(self, seconds: float, every_s: float) -> None:
        """Raises CliError if the mesh is not ready, or does not answer while nobody is struck."""
        why = await self._unless_over(self._settle({}, _FIRST_S))
        if why:
            do = "see `meshctl ps` and `meshctl logs`, and begin when all are ready"
            raise CliError("the mesh is not ready for a storm", why=why, do=do)
        self._before = self._after = await self._actors()
        expected = await self._unless_over(self._take_expected())
        if expected is None:
            return
        self.began_s = time.monotonic()
        make_request, timeout_s = self._asked.request, self._timeout_s
        self._clients = Clients(self._server, expected, make_request, self._num_clients, self._is_excused, timeout_s)
        try:
            await self._strike(seconds, every_s)
            await self._unless_over(self._calm_down(self._clients))
        finally:
            self._striker.wake_all()
            self._ended_s = self._ended_s or time.monotonic()
            await self._clients.leave()
            with contextlib.suppress(NotRunning):
                self._after = await self._actors()

    def seen(self) -> Seen:
        struck = {one.blow.target for one in self._fallen if one.has_landed and one.blow.kind in ("kill", "stop")}
        num_deaths, unstruck = deaths(self._before, self._after, sorted(struck))
        return Seen(
            seconds=max(0.0, self._ended_s - self.began_s),
            began_s=self.began_s,
            sent=self._clients.sent if self._clients is not None else [],
            gaps_s=self._clients.gaps_s if self._clients is not None else [],
            fallen=self._fallen,
            no_promise=self._no_promise,
            unsettled=self._unsettled,
            num_deaths=num_deaths,
            unstruck=unstruck,
            held=self._held,
        )

    async def _take_expected(self) -> list[Answer]:
        """The known answers; taken twice, the second time in another order and with nothing of them in a cache."""
        rounds: list[list[Answer]] = []
        for turn in (1, -1):
            requests = self._asked.undisturbed(f"undisturbed {turn}")[::turn]
            answers = await undisturbed(self._server, requests, self._num_clients, self._timeout_s)
            broken = [answer.broken for answer in answers if answer.broken]
            if broken:
                what = f"{len(broken)} of {len(answers)} requests failed before anybody was struck"
                raise CliError(what, why=broken[0], do="see `meshctl logs`; a storm would show nothing")
            rounds.append(answers[::turn])
        numerics = {actor.actor_id: actor.numerics for actor in self._before if actor.numerics}
        self._no_promise = why_no_promise(numerics, *rounds)
        return rounds[0]

    async def _strike(self, seconds: float, every_s: float) -> None:
        end_s = self.began_s + seconds
        async with asyncio.TaskGroup() as group:
            blows: list[asyncio.Task[None]] = []
            # A storm is a matter of time by its nature: blows fall whether or not the last one is recovered from.
            while not await self._is_over_within(min(every_s, end_s - time.monotonic())) and self._goes_on(end_s):
                blows.append(group.create_task(self._deal(self._blows.next())))
            if blows:
                await self._unless_over(asyncio.wait(blows))
            for blow in blows:
                blow.cancel()

    async def _calm_down(self, clients: Clients) -> None:
        # What they wait for is part of the storm.
        await clients.stop()
        self._ended_s = time.monotonic()
        self._unsettled = await self._settle({}, _SETTLE_S)
        end_s = time.monotonic() + _RELEASE_S
        while time.monotonic() < end_s:
            if not await self._still_held():
                break
            await asyncio.sleep(_LOOK_S)

    async def _still_held(self) -> bool:
        try:
            page, _ = await get(self._server, "/metrics", _SCRAPE_S)
            self._held = held(samples(page.decode(errors="replace")))
        except (Misdeed, ValueError):
            # With API keys it may take an admin's, and a proxy may have other pages: what is not known is not told.
            return False
        return bool(self._held)

    async def _deal(self, blow: Blow) -> None:
        fallen = Fallen(blow, time.monotonic())
        self._fallen.append(fallen)
        struck: Struck | None = None
        try:
            actor = next((one for one in await self._actors() if one.actor_id == blow.target), None)
            fallen.at_s = time.monotonic()
            fallen.is_gateway = actor is not None and actor.role == GATEWAY
            match blow.kind:
                case "kill":
                    struck = self._striker.signal(blow.target, signal.SIGKILL)
                    fallen.has_landed = struck is not None
                case "stop":
                    struck = self._striker.signal(blow.target, signal.SIGSTOP)
                    fallen.has_landed = struck is not None
                    if struck is not None:
                        await asyncio.sleep(blow.lasts_s)
                        fallen.note = "killed by its supervisor" if struck.is_dead else ""
                        self._striker.wake(struck)
                case "garbage":
                    fallen.has_landed = await self._striker.throw(blow, actor.endpoint if actor is not None else None)
                case "slow":
                    fallen.has_landed = await self._striker.read_slowly(blow)
            if not fallen.has_landed:
                return
            # One that was woken goes on in its epoch, or was killed just then.
            is_dead = struck is not None and (blow.kind == "kill" or struck.is_dead)
            later_than = {actor.actor_id: actor.epoch} if actor is not None and is_dead else {}
            if not await self._settle(later_than, _SETTLE_S):
                fallen.settled_s = time.monotonic() - fallen.at_s
        except NotRunning:
            # The end of the storm says that there is nobody left; until then others may have an answer.
            fallen.note = "the supervisor did not answer"
        finally:
            if struck is not None:
                self._striker.wake(struck)
                struck.close()
            self._say(fallen)

    async def _settle(self, later_than: Mapping[str, int], timeout_s: float) -> str:
        """Wait until all are ready, and each of `later_than` in a later epoch; else who was not in the end."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                why = unsettled(await self._actors(), later_than)
            except NotRunning as error:
                why = f"{error.what}: {error.why}"
            if not why or not self._goes_on(end_s):
                return why if self._lives() else f"the mesh has ended: {why or 'its supervisor is gone'}"
            await asyncio.sleep(_LOOK_S)

    def _goes_on(self, end_s: float) -> bool:
        return time.monotonic() < end_s and self._lives()

    async def _actors(self) -> list[ActorStatus]:
        return (await self._ask(ListActors(), ActorList)).actors

    def _is_excused(self, began_s: float, ended_s: float) -> bool:
        return any(one.may_break(began_s, ended_s) for one in self._fallen)

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        return self._is_over.is_set()

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of it; None, and it is cancelled, if the storm is interrupted before that."""
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(self._is_over.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
