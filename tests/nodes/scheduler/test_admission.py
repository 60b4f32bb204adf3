"""Page credit, projected growth, and who is let in."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from nodes.protocol.steps import RowColumn
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.batch.growth import FIRST_RATIO, GROWTH_HORIZON_TOKENS, LEAST_RATIO, GrowthEstimate
from nodes.scheduler.queue.admission import Credit, num_shared_tokens
from nodes.scheduler.sequence import Sequence, Stage
from nodes.trace_notes import Noted
from tests.nodes.scheduler.scheduler_world import NO_STOP, PAGE, World, prompt, started
from tests.nodes.step_plans import column

SPEC = RequestSpec(Sampling(), NO_STOP)


def sequence(length: int, max_length: int, *, prompt: int | None = None) -> Sequence:
    one = Sequence(1, range(length), length if prompt is None else prompt, SPEC, 0.0)
    one.max_length = max_length
    return one


@pytest.fixture
def growth() -> GrowthEstimate:
    return GrowthEstimate(4)


def test_growth_is_a_share_of_what_is_left(growth: GrowthEstimate) -> None:
    growth.new_token_ratio = 0.5
    assert growth.num_pages(sequence(10, 31)) == 3, "20 tokens more have KV, half of them are expected"
    assert growth.num_pages(sequence(10, 11)) == 0
    assert growth.num_pages(sequence(10, 10**6)) == GROWTH_HORIZON_TOKENS * 0.5 / 4
    ordered = sequence(10, 31)
    ordered.order_id = "g"
    assert growth.num_pages(ordered) == 0


def test_the_share_sinks_with_steps_and_rises_with_preemptions(growth: GrowthEstimate) -> None:
    for _ in range(10_000):
        growth.stepped()
    assert growth.new_token_ratio == LEAST_RATIO
    growth.preempted([sequence(60, 110, prompt=10)])
    assert growth.new_token_ratio == (50 + 20) / 100
    growth.preempted([])
    growth.preempted([sequence(10, 110, prompt=10)])
    assert growth.new_token_ratio == 0.7, "never lower by a preemption"
    growth.preempted([sequence(110, 110, prompt=10)])
    assert growth.new_token_ratio == 1.0
    growth.idle()
    assert growth.new_token_ratio == FIRST_RATIO


def test_credit_counts_the_growth_of_all_who_run(growth: GrowthEstimate) -> None:
    growth.new_token_ratio = 1.0
    running = sequence(8, 17)
    credit = Credit(growth, 10, [running])
    assert not credit.take(sequence(20, 34), 5), "5 now, 4 later, 2 for the one that runs"
    assert credit.take(sequence(20, 30), 5)
    assert not credit.take(sequence(4, 5), 1)
    credit.refresh(11)
    assert credit.take(sequence(4, 5), 1)
    assert not credit.take(sequence(400, 500), 100)


def test_whoever_is_alone_needs_no_credit_for_growth(growth: GrowthEstimate) -> None:
    credit = Credit(growth, 10, [])
    assert not credit.take(sequence(44, 45), 11)
    assert credit.take(sequence(40, 9999), 10)


def test_pages_are_left_to_those_who_go_first(growth: GrowthEstimate) -> None:
    credit = Credit(growth, 10, [])
    credit.set_aside(6)
    assert not credit.take(sequence(20, 21), 5)
    assert credit.take(sequence(16, 17), 4)


@given(
    left=st.lists(st.integers(0, 2), max_size=40),
    right=st.lists(st.integers(0, 2), max_size=40),
    same=st.integers(0, 40),
    key=st.booleans(),
)
def test_shared_tokens(left, right, same, key) -> None:
    right = left[:same] + right
    other = replace(SPEC, extra_key="x" if key else "")
    one, two = (Sequence(1, tokens, len(tokens), spec, 0.0) for tokens, spec in ((left, SPEC), (right, other)))
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert num_shared_tokens(one, two, PAGE) == (0 if key else common // PAGE * PAGE)


def stages(world: World, name: str = "m") -> list[Stage]:
    return [one.stage for one in world.cores[name].books.attempts]


def test_prompts_enter_as_steps_have_room_for_them() -> None:
    world = started(num_pages={"m": 200})
    for base in range(6):
        world.submit(prompt(30, base), "m")
    world.flush("w-m")
    # The first request's step went out alone; the next step has 32 tokens, which 4 chunks of 8 fill.
    assert [len(column(packet.buffers, RowColumn.SLOT)) for packet in world.links["m", "w-m"]] == [1, 1]
    assert stages(world).count(Stage.PREFILL) == 4
    assert stages(world).count(Stage.WAITING) == 2


def test_a_prompt_waits_for_its_prefix_that_is_being_computed() -> None:
    world = started(num_pages={"m": 200})
    world.submit(prompt(30), "m")
    world.submit([*prompt(24), 7], "m")
    world.submit([*prompt(24), 8], "m", extra_key="other")
    world.flush("w-m")
    assert stages(world) == [Stage.PREFILL, Stage.WAITING, Stage.PREFILL]
    world.settle()
    assert [one.num_cached_tokens for one in world.requests.values()] == [0, 24, 0]


def test_who_lacks_credit_waits_and_holds_up_those_behind() -> None:
    world = started(num_pages={"m": 41})
    world.submit(prompt(40, 1), "m", max_tokens=40)
    world.flush("w-m")
    world.submit(prompt(90, 2), "m", max_tokens=40)
    # Needs too much to pass: the one before it would wait longer each time.
    world.submit(prompt(8, 3), "m", max_tokens=20)
    world.flush("w-m")
    assert stages(world) == [Stage.PREFILL, Stage.WAITING, Stage.WAITING]
    core = world.cores["m"]
    assert core.stats()["mesh_scheduler_lacks_pages"] == 1
    world.settle()
    assert core.stats()["mesh_scheduler_lacks_pages"] == 0


def test_who_lacks_pages_is_noted_once() -> None:
    world, noted = started(num_pages={"m": 41}), list[tuple[Noted, str]]()
    world.cores["m"].books.outbox.note = lambda kind, request_id, a, b: noted.append((kind, request_id))
    for number in range(4):
        world.submit(prompt(40, number), "m", max_tokens=40)
    world.settle()
    lacking = [request_id for kind, request_id in noted if kind == Noted.NO_PAGES]
    assert lacking
    assert len(lacking) == len({*lacking})


def test_no_more_than_max_running() -> None:
    world = started(max_running=2)
    for base in range(5):
        world.submit(prompt(5, base), "m")
    world.flush("w-m")
    assert stages(world).count(Stage.WAITING) == 3


def test_whoever_is_prefilled_elsewhere_does_not_wait_for_steps() -> None:
    world = started(num_pages={"d": 200, "p": 200})
    for base in range(4):
        world.submit(prompt(30, base), "d")
    world.flush("w-d")
    for base in range(4, 40):
        world.submit(prompt(30, base), "d")
    world.submit(prompt(30, 50), "d", prefill="p")
    world.flush("w-d", "w-p")
    assert stages(world, "d")[-1] is Stage.WAITING, "the walk ends after so many that must wait"
    world.settle()
    world.submit(prompt(30, 60), "d")
    for base in range(61, 66):
        world.submit(prompt(30, base), "d")
    world.submit(prompt(30, 70), "d", prefill="p")
    world.flush("w-d", "w-p")
    assert stages(world, "d")[-1] is Stage.HANDOFF
    assert Stage.WAITING in stages(world, "d")


def test_a_short_rest_is_prefilled_here() -> None:
    world = started(num_pages={"d": 60, "p": 60}, local_prefill_max=6)
    world.submit(prompt(30), "d")
    world.settle()
    world.submit([*prompt(28), 5, 6, 7], "d", prefill="p")
    world.submit([*prompt(28), 5, 6, 7, 8, 9, 10, 11], "d", prefill="p")
    world.settle()
    assert world.cores["d"].grants.num_done == 1


def test_holding_the_cached_prefix_may_leave_too_few_pages() -> None:
    # 20 pages: A's 10 stay cached. B runs and needs most of the others; C finds A's prefix, which nobody holds.
    world = started(num_pages={"m": 21}, context_length=84)
    world.submit(prompt(40), "m", max_tokens=1)
    world.settle()
    core = world.cores["m"]
    held = core.books.cache.start([999] * 5)
    held.reserve(9 * PAGE)
    assert (core.books.cache.num_available(), held.num_missing(0)) == (11, 0)
    request = world.submit([*prompt(40), *prompt(8, 5)], "m", max_tokens=1)
    world.flush("w-m")
    assert stages(world)[-1] is Stage.WAITING
    assert core.books.cache.num_sequences == 1
    held.release()
    world.members()
    world.settle()
    assert request.num_cached_tokens == 40
