"""What an actor keeps of its last ten minutes, and how it is asked for."""

from mesh.actor import Actor
from mesh.runtime.history import EVERY_S, NUM_KEPT, FigureHistory
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.actors import Actors
from mesh.wire.frames import History, StatsReply, StatsRequest
from nodes.registry.actor import RegistryActor
from nodes.roles import NODE_CODEC


def test_samples_come_once_in_five_seconds_and_the_oldest_go() -> None:
    history = FigureHistory()
    assert history.after(0, 1.0) == History(number=0)
    for beat in range(NUM_KEPT * 20):
        now = beat / 2
        if history.is_due(now):
            history.add(now, {"a": now}, {})
    now = NUM_KEPT * 10
    found = history.after(0, now)
    assert (found.number, len(found.ages_s), len(found.columns["a"])) == (2 * NUM_KEPT, NUM_KEPT, NUM_KEPT)
    assert (found.ages_s[0], found.ages_s[-1]) == (NUM_KEPT * EVERY_S, EVERY_S)
    assert [now - age for age in found.ages_s] == found.columns["a"]
    assert history.after(2 * NUM_KEPT - 2, now).columns == {"a": found.columns["a"][-2:]}
    assert history.after(2 * NUM_KEPT, now) == History(number=2 * NUM_KEPT)
    assert history.after(10**9, now).ages_s == [], "a number of another incarnation"


def test_of_what_is_observed_the_mean_since_the_last_sample_is_kept() -> None:
    history = FigureHistory()
    history.add(0.0, {}, {})
    history.add(5.0, {"a": 1.0}, {"seconds": (2, 3.0)})
    history.add(10.0, {}, {"seconds": (2, 3.0)})
    history.add(15.0, {}, {"seconds": (6, 4.0)})
    assert history.after(0, 15.0).columns == {"a": [-1, 1, -1, -1], "seconds": [-1, 1.5, -1, 0.25]}


class Keeper(Actor):
    role = "keeper"
    codec = NODE_CODEC
    kept = ("mesh_depth", "mesh_wait_seconds", "mesh_absent")

    def stats(self) -> dict[str, float]:
        return {"mesh_depth": 3.0, "mesh_width": 1.0}

    def totals(self) -> dict[str, float]:
        return {"mesh_done": 7.0}


async def test_an_actor_is_asked_for_what_it_keeps_and_not_told_unasked() -> None:
    actors = Actors(SimulatedNetwork(seed=0))
    try:
        await actors.start("registry", RegistryActor(lease_s=1.0))
        await actors.start("a", Keeper())
        asker = (await actors.start("b", Keeper())).actor.ctx
        actors.systems["a"].metrics.observe("mesh_wait_seconds", 0.5)

        async def ask(after: int | None) -> History | None:
            reply = (await asker.ask("a", StatsRequest(history_after=after), timeout_s=1)).message
            assert isinstance(reply, StatsReply)
            return reply.history

        assert await ask(None) is None
        found = await ask(0)
        assert found is not None
        assert (found.number, sorted(found.columns)) == (1, ["mesh_depth", "mesh_done_per_second"])
        assert found.columns["mesh_depth"] == [3.0]
        again = await ask(1)
        assert again is not None
        assert again.ages_s == []
    finally:
        await actors.stop()
