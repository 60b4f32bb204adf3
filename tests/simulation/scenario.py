"""One seeded run of a whole mesh: faults and clients drawn from the seed, and what has to hold whatever they are."""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog

from mesh.simulation.faults import Faults
from mesh.simulation.virtual_time import run
from nodes.request import TOKENS
from nodes.worker.steps.step import CORRUPT_PAGE
from tests.simulation.asking import END, NOTHING, Asks, answer, counted, draw_asks, draw_unknown
from tests.simulation.hardware import extra_of
from tests.simulation.whole_mesh import CONTEXT_LENGTH, Outcome, SimulatedMesh

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
SHARED_PREFIX = "all of us begin with these same words, which a cache may keep; "
# Four whole pages: prompts share nothing beyond them, so that many sequences hang on the same page.
SHARED_PAGES = SHARED_PREFIX + "!"
PAGE_SIZE = 16
SILENT = structlog.make_filtering_bound_logger(logging.CRITICAL)
LIMIT_S = 900.0
REQUEST_LIMIT_S = 600.0


@dataclass(frozen=True)
class Client:
    """One call: when it comes, what it asks, and whether it leaves early."""

    arrives_s: float
    prompt: str
    max_tokens: int
    n: int
    stop: str
    seed: int
    leaves_after_s: float | None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    # How many tokens it wants to know of in each place of its prompt; -1: none, not even the prompt's own.
    prompt_top: int = -1
    asks: Asks = NOTHING
    # A vector is wanted, if it is not `TOKENS`.
    kind: str = TOKENS
    # Its pages are for clients of the same salt alone.
    salt: str = ""

    def body(self) -> bytes:
        fields = {
            "model": "echo", "prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.n, "seed": self.seed,
            "stream": True,
        }  # fmt: skip
        chosen = {"stop": self.stop, "min_tokens": self.min_tokens}
        # Echo draws the same with it, but checks that the output it has to look back at is in the pages.
        chosen |= {"repetition_penalty": self.repetition_penalty}
        chosen |= {"cache_salt": self.salt}
        fields |= {name: value for name, value in chosen.items() if value}
        return json.dumps(fields | self.asks.fields()).encode()

    def expected(self) -> tuple[str, str, list[int]]:
        """Text, finish reason and output ids, of which the last may be the end, which has no text."""
        if self.kind != TOKENS:
            return "", "stop", []
        token_ids = self._answer()
        ends = token_ids[-1] == END
        text = bytes(token_ids[: len(token_ids) - ends]).decode()
        if self.stop and self.stop in text:
            at = text.index(self.stop)
            return text[:at], "stop", token_ids[: at + len(self.stop)]
        return text, "stop" if ends else "length", token_ids

    def expected_vector(self) -> bytes:
        """What is pooled of echo's states: a position's token, the position, their product, 1."""
        if self.kind == TOKENS:
            return b""
        states = [(token, at, token * at, 1) for at, token in enumerate(self.prompt.encode())]
        # Sums of a few hundred of them have no fraction, so the order in which they are added does not show.
        mean = np.sum(states, axis=0, dtype=np.float32) / np.float32(len(states))
        pooled = {"mean": mean, "last": states[-1], "cls": states[0]}[self.kind]
        return np.asarray(pooled, np.float32).tobytes()

    def _answer(self) -> list[int]:
        return answer(self.prompt, self.max_tokens, self.min_tokens, self.asks)

    def can_be_served(self) -> bool:
        """Whether something is left to draw at every position."""
        try:
            self._answer()
        except StopIteration:
            return False
        return True

    def num_pages(self) -> int:
        """Pages that the longest answer would take: the last token's KV is never computed."""
        return -(-(min(len(self.prompt) + self.max_tokens, CONTEXT_LENGTH) - 1) // PAGE_SIZE)


def draw_faults(draw: random.Random, theme: str) -> Faults:
    """One to all fault classes, at rates from rare to severe."""
    severity = draw.choice([0.05, 0.2] if theme == "leavers" else [0.002, 0.01, 0.05])

    def rate() -> float:
        return severity * draw.random() if draw.random() < 0.7 else 0.0

    return Faults(
        drop=rate(), duplicate=rate(), slow=rate() * draw.choice([1.0, 4.0]), slow_s=draw.choice([0.02, 0.5, 2.0]),
        reset=rate() * (0.5 if theme == "leavers" else 0.1),
        silent_down=draw.choice([0.0, 0.3, 0.9]) if theme != "silence" else 0.95,
        partition=draw.choice([0.0, 0.02, 0.1]), partition_s=(0.05, draw.choice([0.3, 2.5])),
    )  # fmt: skip


THEMES = ["", "", "", "steps", "copies", "leavers", "stalls", "silence", "sources"]
"""What a seed is about: everything, or one kind of trouble often enough that rare coincidences come about.

`steps`: schedulers die, alone or with their workers, while long steps run, and are back before those end. `copies`:
schedulers and agents die during slow copies in small pools, and clients leave; decode prefills for itself meanwhile, so
that steps want the pages that copies still write. `sources`: prefill schedulers die during slow copies, and their
successors want the pages that are still read. `stalls`: schedulers die while a step takes seconds; short prompts, which
decode prefills itself, and long ones take turns, so that transfers want the pages that the step still writes.
`leavers`: all clients leave or lose their gateway, in a network that loses much, in the middle of long answers.
`silence`: gateways die, alone or with another, and are back before anybody has noticed.
"""


def draw_clients(draw: random.Random, theme: str) -> list[Client]:
    """Up to a dozen calls within some seconds; short and long prompts, some with a common prefix, some that leave."""
    leaving, lengths, max_tokens = 0.25, [1, 4, 12, 12, 24, 40], [1, 8, 40, 200]
    if theme == "copies":
        leaving, lengths = 0.5, [2, 12, 24, 24]
    elif theme == "sources":
        # What fits decode's pool fits prefill's smaller one too, which serves it while decode is away.
        lengths, max_tokens = [12, 24, 24], [1, 8, 40]
    elif theme == "stalls":
        lengths = [2, 3, 24]
    elif theme == "leavers":
        leaving, lengths, max_tokens = 1.0, [24, 40], [200]
    clients: list[Client] = []
    prefix = draw.choice([SHARED_PREFIX, SHARED_PAGES])
    num_alike = {"stalls": 0.9, "sources": 0.1}.get(theme, draw.choice([0.4, 0.4, 0.9]))
    spread_s = draw.choice([0.1, 3.0, 3.0, 8.0])
    for number in range(draw.choice([4, 8, 8, 12])):
        words = " ".join(draw.choices(WORDS, k=draw.choice(lengths)))
        prompt = (prefix if draw.random() < num_alike else "") + f"{number} {words}"
        clients.append(
            Client(
                arrives_s=draw.random() * draw.choice([0.1, spread_s]),
                prompt=prompt,
                max_tokens=min(draw.choice(max_tokens), CONTEXT_LENGTH - len(prompt)),
                n=draw.choice([1, 1, 1, 3]),
                stop=draw.choice(["", "", draw.choice(WORDS)[1:]]),
                seed=number,
                leaves_after_s=draw.random() * draw.choice([0.1, 0.5, 3.0]) if draw.random() < leaving else None,
            )
        )
    return clients


def draw_min_tokens(seed: int, clients: list[Client]) -> list[Client]:
    """Half of the clients whose answer would end by itself want it longer, some more than twice as long."""
    draw = random.Random(f"min_tokens/{seed}")

    def drawn(client: Client) -> Client:
        room = client.max_tokens - len(client.prompt)
        if client.stop or room < 2 or draw.random() < 0.5:
            return client
        return replace(client, min_tokens=len(client.prompt) + draw.randrange(1, min(room, 60)))

    return [drawn(client) for client in clients]


def draw_penalties(seed: int, clients: list[Client]) -> list[Client]:
    """For some clients, sampling looks back at what was said."""
    draw = random.Random(f"penalties/{seed}")
    return [replace(client, repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.2])) for client in clients]


def draw_asking(seed: int, theme: str, clients: list[Client]) -> list[Client]:
    """In half of the meshes, most clients ask something of their draws. What leavers leave has to be long."""
    draw = random.Random(f"asks/{seed}")
    if draw.random() < 0.5 or theme == "leavers":
        return clients
    asking = [replace(one, asks=draw_asks(draw, one.prompt)) if draw.random() < 0.7 else one for one in clients]
    return [asks if asks.can_be_served() else one for one, asks in zip(clients, asking, strict=True)]


def draw_old_workers(seed: int, workers: list[str]) -> dict[str, frozenset[str]]:
    """Some of these workers are of a release that does not know all asks."""
    draw = random.Random(f"old workers/{seed}")
    return {worker: draw_unknown(draw) for worker in workers}


@dataclass(frozen=True)
class Calamity:
    """What happens to an actor, or to several at once.

    `kill`; `point`: it dies at its `points`-th message or store; `hang`: until the supervisor kills it; `pause`: for
    a while; `pool`: the agent dies, and the pool of one group with it; `gone`: it dies and never comes back.
    """

    at_s: float
    actor_ids: list[str]
    kind: str
    points: int
    lasts_s: float


ACTORS = ["registry", "kv-agent-0", "tokenizer-0", "detokenizer-0", "detokenizer-1", "gateway-0"]


def draw_tp_sizes(seed: int, groups: list[str]) -> dict[str, int]:
    """A quarter of all meshes have groups of tensor-parallel ranks, of equal sizes or not."""
    draw = random.Random(f"ranks/{seed}")
    if draw.random() >= 0.25:
        return {}
    return {group: draw.choice([1, 2, 2, 2, 3]) for group in groups}


def draw_calamities(
    draw: random.Random, theme: str, groups: list[str], clients: list[Client], ranks: list[str]
) -> list[Calamity]:
    """None to five of them, soon after a client has come; most of them to schedulers and workers.

    Actors that share a cause die together: a scheduler and its worker, a scheduler and one that it works with.
    `ranks` are workers of rank 1 and above.
    """
    engine = [f"{role}-{group}" for group in groups for role in ("scheduler", "worker")]
    engine += ranks
    pairs = [[f"scheduler-{group}", f"worker-{group}"] for group in groups]
    pairs += [[f"scheduler-{group}", other] for group in groups for other in ("kv-agent-0", "gateway-0")]
    pairs.append([f"scheduler-{group}" for group in groups])
    singles, shared = ACTORS, 0.25
    if theme == "steps":
        singles, shared = [f"scheduler-{group}" for group in groups], 0.4
    elif theme == "copies":
        singles = ["scheduler-decode-0"]
    elif theme == "leavers":
        singles = ["gateway-0"]
    elif theme == "silence":
        pairs, shared = (
            [
                [one, "gateway-0"]
                for one in (*(f"scheduler-{group}" for group in groups), "detokenizer-0", "tokenizer-0")
            ],
            0.7,
        )
    drawn: list[Calamity] = []
    for _ in range(draw.choice([0, 1, 2, 3, 5])):
        kind = draw.choice(["kill", "point", "point", "point", "hang", "pause"])
        lasts_s = draw.uniform(0.05, 1.4) if kind == "pause" else draw.uniform(1.5, 4.0)
        actor_ids = [draw.choice(engine if draw.random() < 0.5 else singles)]
        if draw.random() < shared:
            actor_ids = draw.choice(pairs)
        at_s = draw.choice(clients).arrives_s + draw.random() * draw.choice([0.1, 0.5, 3.0])
        drawn.append(Calamity(at_s, actor_ids, kind, draw.randrange(1, draw.choice([60, 600])), lasts_s))
    if draw.random() < 0.1:
        drawn.append(Calamity(draw.random() * 3.0, ["detokenizer-1"], "gone", 0, 0.0))
    if draw.random() < 0.05:
        drawn.append(Calamity(draw.random() * 3.0, ["kv-agent-0"], "pool", draw.randrange(8), 0.0))
    return drawn


async def _befall(mesh: SimulatedMesh, calamity: Calamity) -> None:
    await asyncio.sleep(calamity.at_s)
    hangs: list[Awaitable[None]] = []
    for actor_id in calamity.actor_ids:
        process = mesh.processes[actor_id]
        if calamity.kind == "gone":
            mesh.gone.add(actor_id)
            process.kill()
        elif calamity.kind == "kill":
            process.kill()
        elif calamity.kind == "pool":
            mesh.lose_pool(mesh.groups[calamity.points % len(mesh.groups)])
        elif calamity.kind == "point":
            process.arm(calamity.points)
        else:
            hangs.append(mesh.hang(actor_id, calamity.lasts_s, kill=calamity.kind == "hang"))
    await asyncio.gather(*hangs)


Judge = Callable[[SimulatedMesh, Client, Outcome, float], str]
"""What is wrong with what a client saw of one sample, after so many seconds; empty if nothing is."""


async def ask(mesh: SimulatedMesh, client: Client, number: int, judge: Judge) -> list[str]:
    """One client's call, and what is wrong with it."""
    await asyncio.sleep(client.arrives_s)
    loop = asyncio.get_running_loop()
    began, request_id = loop.time(), f"cmpl-{number}"
    async with asyncio.timeout(REQUEST_LIMIT_S):
        outcomes = await mesh.request(
            client.body(),
            request_id,
            abandon_after_s=client.leaves_after_s,
            prompt_top=client.prompt_top,
            kind=client.kind,
        )
    elapsed_s = loop.time() - began
    return [
        f"{request_id}-{index} ({client}) after {elapsed_s:.1f} s: {problem}"
        for index, outcome in enumerate(outcomes)
        if (problem := judge(mesh, client, outcome, elapsed_s))
    ]


async def ask_all(mesh: SimulatedMesh, clients: list[Client], judge: Judge) -> list[str]:
    """All clients' calls, each when it is due."""
    asked = await asyncio.gather(*(ask(mesh, client, number, judge) for number, client in enumerate(clients)))
    return [problem for of_client in asked for problem in of_client]


def judge_outcome(mesh: SimulatedMesh, client: Client, outcome: Outcome, _elapsed_s: float) -> str:
    """Every request ends once, with the right text or vector, whatever happens, except for those that never fit."""
    text, reason, token_ids = client.expected()
    if outcome.vector not in (b"", expected := client.expected_vector()):
        return f"its vector {outcome.vector.hex()} is not {expected.hex()}"
    never_fits = client.num_pages() > mesh.speeds.num_pages - 1
    if problem := judge_tokens(mesh, client, outcome, token_ids):
        return problem
    if outcome.num_ends == 0:
        if client.leaves_after_s is None and not outcome.gateway_died and not never_fits:
            return "it never ended"
        return "" if text.startswith(outcome.text) else f"text {outcome.text!r} is not the beginning of {text!r}"
    if outcome.num_ends > 1:
        return f"it ended {outcome.num_ends} times"
    if never_fits:
        code = None if outcome.failure is None else outcome.failure.code
        return "" if code == "never_fits" else f"it can never fit, and ended with {outcome.failure} {outcome.text!r}"
    if outcome.failure is not None:
        return f"it failed: {outcome.failure}"
    if client.kind != TOKENS and not outcome.vector:
        return "it ended without its vector"
    if (outcome.text, outcome.finish_reason) != (text, reason):
        return f"{outcome.text!r} ({outcome.finish_reason}) is not {text!r} ({reason})"
    if outcome.token_ids != token_ids:
        return f"its output ids {outcome.token_ids} are not {token_ids}"
    return ""


def judge_tokens(mesh: SimulatedMesh, client: Client, outcome: Outcome, token_ids: list[int]) -> str:
    """What is wrong with the tokens so far and what came beside them: for each what its worker read, and said of it."""
    num = len(outcome.token_ids)
    if outcome.token_ids != token_ids[:num]:
        return f"its output ids {outcome.token_ids} are not the beginning of {token_ids}"
    # Beside tokens of which nothing is read come empty values, or none.
    if not mesh.says_more and client.asks.top is None and not any(outcome.extras):
        return ""
    if len(outcome.extras) != num:
        return f"{len(outcome.extras)} values came beside {num} tokens"
    for position, (token, extra) in enumerate(zip(outcome.token_ids, outcome.extras, strict=True)):
        expected = client.asks.beside(token) + (extra_of(position, token) if mesh.says_more else b"")
        if extra != expected:
            return f"{extra!r} beside {token} at {position} is not {expected!r}"
    return ""


async def _scenario(mesh: SimulatedMesh, clients: list[Client], calamities: list[Calamity]) -> list[str]:
    faults, mesh.network.faults = mesh.network.faults, Faults()
    await mesh.start()
    mesh.network.faults = faults
    befalling = [asyncio.ensure_future(_befall(mesh, calamity)) for calamity in calamities]
    problems = await ask_all(mesh, clients, judge_outcome)
    await asyncio.gather(*befalling)
    return problems


def play(mesh: SimulatedMesh, scenario: Coroutine[Any, Any, list[str]], *told: object) -> None:
    """Run a scenario, which returns problems, on virtual time until nobody holds anything any more.

    Raises AssertionError with all problems, the last messages and what is `told` about the run.
    """
    structlog.configure(wrapper_class=SILENT)

    async def to_its_end() -> list[str]:
        try:
            problems = await scenario
            await mesh.settle()
            await mesh.stop()
        finally:
            mesh.bury()
        return problems

    try:
        problems = run(to_its_end(), limit_s=LIMIT_S)
    except BaseException as error:
        error.add_note("\n".join([mesh.network.report(60), *map(str, told)]))
        raise
    problems += mesh.failed_cores
    problems += mesh.late_asks.found + mesh.tombstones.found + mesh.unopened.found
    problems += [f"{num} rows failed with {code}" for code, num in mesh.errors.items() if code == CORRUPT_PAGE]
    assert not problems, "\n".join([*problems, mesh.network.report(60), *map(str, told)])


Alter = Callable[[int, list[Client]], list[Client]]
"""What another suite makes of a seed's clients."""
Kind = Callable[[int, Faults, bool, str], SimulatedMesh]
"""Makes a mesh of a seed, faults, whether it has one group for both phases, and a theme."""


def run_seed(
    seed: int, alter: Alter | None = None, suite: str = "scenario", kind: Kind = SimulatedMesh
) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"scenario/{seed}")
    theme = draw.choice(THEMES)
    mixed = draw.random() < 0.2 and theme not in ("copies", "sources")
    clients = draw_asking(seed, theme, draw_penalties(seed, draw_min_tokens(seed, draw_clients(draw, theme))))
    clients = clients if alter is None else alter(seed, clients)
    faults = draw_faults(draw, theme)
    # Half of all meshes have a perfect network, except that connections of the dead may end silently.
    quiet = Faults(silent_down=draw.choice([0.0, 0.3]) if theme != "silence" else 0.95)
    mesh = kind(seed, quiet if draw.random() < 0.5 else faults, mixed, theme)
    mesh.tp_sizes = draw_tp_sizes(seed, mesh.groups)
    ranks = [worker for group in mesh.groups for worker in mesh.worker_ids(group)[1:]]
    # Not where decode's requests may have to go.
    workers = [] if mixed or theme == "leavers" else [*mesh.worker_ids("prefill-0")]
    mesh.unknown = draw_old_workers(seed, workers)
    calamities = draw_calamities(draw, theme, mesh.groups, clients, ranks)
    replay = f"replay: python -m tests.simulation {suite} {seed}"
    play(mesh, _scenario(mesh, clients, calamities), mesh.faults, calamities, replay)
    counts = Counter(dict(mesh.network.counts)) + Counter({f"died: {role}": n for role, n in mesh.deaths.items()})
    ranks = Counter({"steps of ranks": sum(len(one[0]) for one in mesh.lockstep.begun.values())})
    counts += mesh.moments.counts + mesh.devices.counts + Counter({"died in a store": mesh.host.num_torn}) + ranks
    return counts + counted([client.asks for client in clients], mesh.unknown.values())
