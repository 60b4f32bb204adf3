"""A worker that dies in the same step again: who does it is found out, everybody else goes on."""

from nodes.protocol import StepPlan
from nodes.protocol.steps import RowColumn
from nodes.scheduler.worker_link.worker_deaths import POISONED
from tests.nodes.scheduler.scheduler_world import EDGE, World, prompt
from tests.nodes.step_plans import column


class Deadly:
    """A world in which the worker of a group dies when it begins a step with a row of one request."""

    def __init__(self, **num_pages: int) -> None:
        self.world = World(num_pages=num_pages, max_running=8)
        self.world.flush()
        self.killers: dict[str, str] = {}
        self.num_deaths = 0
        self.alone: list[int] = []

    def run(self, limit: int = 3000) -> None:
        """Until every request has ended."""
        world = self.world
        for _ in range(limit):
            links = world.busy_links()
            if not links:
                if all(request.is_over for request in world.requests.values()):
                    return
                world.advance(world.now + 0.5)
                continue
            for link in links:
                if world.links[link] and not self._dies(link):
                    world.deliver(link)
        raise AssertionError("it does not end")

    def _dies(self, link) -> bool:
        group, worker = link[0], link[1]
        packet = self.world.links[link][0]
        plan = packet.message
        if not isinstance(plan, StepPlan) or f"w-{group}" != worker:
            return False
        running = self.world.cores[group].books.running
        sequences = column(packet.buffers, RowColumn.SEQUENCE)
        # Orders of another group's scheduler are among those that run, and not among the attempts.
        names = {one.request_id for key, one in (running.prefilling | running.decoding).items() if key in sequences}
        if plan.scheduler_epoch != self.world.workers[worker].core.scheduler_epoch:
            return False
        self.alone.append(len(sequences))
        if self.killers.get(group) not in names:
            return False
        self.num_deaths += 1
        self.world.restart_worker(group)
        self.world.members()
        return True


def test_who_kills_the_worker_fails_and_nobody_else() -> None:
    deadly = Deadly(m=60)
    world = deadly.world
    requests = [world.submit(prompt(9 + base, base), "m", max_tokens=6) for base in range(4)]
    killer = world.submit(prompt(11, 9), "m", max_tokens=6)
    deadly.killers["m"] = killer.request_id
    deadly.run()
    assert killer.failure == POISONED
    assert killer.why == "w-m died 3 times while it computed this request, the last time alone"
    assert all(request.finish for request in requests)
    assert (deadly.num_deaths, world.cores["m"].deaths.num_poisoned) == (3, 1)


def test_one_who_was_only_there_is_cleared_by_a_step_alone() -> None:
    deadly = Deadly(m=60)
    world = deadly.world
    requests = [world.submit(prompt(9, base), "m", max_tokens=8, ignore_eos=True) for base in range(3)]
    world.until(lambda: all(len(request.output_ids) >= 2 for request in requests))
    core = world.cores["m"]
    for _ in range(2):
        world.flush("w-m")
        assert core.pipeline.num_inflight
        world.restart_worker("m")
        world.members()
        world.flush(("m", "w-m"), ("w-m", EDGE))
        while core.pipeline.adopted is None:
            world.deliver(("m", "w-m"))
            world.deliver(("w-m", "m"))
    assert core.deaths.next_suspect() is not None
    deadly.alone.clear()
    deadly.run()
    assert deadly.alone[:3] == [1, 1, 1]
    assert 3 in deadly.alone
    assert core.deaths.num_poisoned == 0


def test_a_prompt_that_kills_the_prefill_worker_does_not_go_on_to_kill_the_next() -> None:
    deadly = Deadly(p=60, d=60)
    world = deadly.world
    killer = world.submit(prompt(39), "d", prefill="p", max_tokens=6)
    other = world.submit(prompt(37, 5), "d", prefill="p", max_tokens=6)
    deadly.killers = {"p": killer.request_id, "d": killer.request_id}
    deadly.run()
    assert killer.failure == POISONED
    assert other.finish
    assert deadly.num_deaths == 3
