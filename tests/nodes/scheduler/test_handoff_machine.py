"""Handoffs between schedulers under every fault of the wire: hypothesis chooses what arrives, what is lost, who dies.

Two decode groups and a prefill group share small pools. At every moment each page is in one book only; in the end, once
the wire is healed, every request has ended exactly once, with the tokens of the undisturbed run, and nothing is held.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.nodes.scheduler.scheduler_world import EDGE, World

GROUPS = ("d", "e", "p")


class Handoffs(RuleBasedStateMachine):
    @initialize(
        pages=st.tuples(*(st.sampled_from([21, 26, 40]) for _ in GROUPS)),
        max_running=st.sampled_from([2, 4, 16]),
        depth=st.sampled_from([1, 2]),
        policy=st.sampled_from(["fcfs", "longest_prefix", "depth_first", "shortest_first", "priority", "random"]),
    )
    def build(self, pages, max_running, depth, policy):
        self.world = World(
            num_pages=dict(zip(GROUPS, pages, strict=True)),
            context_length=80,
            max_running=max_running,
            pipeline_depth=depth,
            policy=policy,
        )

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 45),
        own=st.integers(0, 3),
        max_tokens=st.integers(0, 24),
        group=st.sampled_from(["d", "e"]),
        prefill=st.sampled_from(["p", "p", "", "d"]),
        min_tokens=st.sampled_from([0, 4]),
        ignore_eos=st.booleans(),
    )
    def submit(self, base, length, own, max_tokens, group, prefill, min_tokens, ignore_eos):
        if len(self.world.requests) == 12:
            return
        prompt = [2 + (base * 301 + index * 13) % 900 for index in range(length)] + [901 + own] * (own > 0)
        self.world.submit(
            prompt, group, prefill=prefill, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos
        )

    @rule(number=st.integers(1, 12), data=st.data())
    def deliver(self, number, data):
        for _ in range(number):
            links = self.world.busy_links()
            if links:
                self.world.deliver(data.draw(st.sampled_from(links)))

    @rule()
    def deliver_all(self):
        self.world.flush()

    @rule(data=st.data(), twice=st.booleans())
    def drop_or_repeat(self, data, twice):
        links = self.world.busy_links()
        if links:
            disturb = self.world.repeat if twice else self.world.drop
            disturb(data.draw(st.sampled_from(links)))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0, 15.0]))
    def wait(self, seconds):
        self.world.advance(self.world.now + seconds)

    @rule(which=st.integers(0, 11))
    def cancel(self, which):
        if which < len(self.world.requests):
            self.world.cancel(self.world.requests[f"r{which}"])

    @rule(which=st.integers(0, 11), share=st.sampled_from([0.0, 0.5, 1.0]), detokenizer=st.sampled_from(["", EDGE]))
    def resend(self, which, share, detokenizer):
        if which < len(self.world.requests):
            request = self.world.requests[f"r{which}"]
            self.world.resend(request, int(len(request.output_ids) * share), detokenizer)

    @rule(group=st.sampled_from(GROUPS))
    def kill_worker(self, group):
        self.world.restart_worker(group)

    @rule(group=st.sampled_from(GROUPS))
    def fail_transfer(self, group):
        self.world.agents[f"a-{group}"].fail_next = True

    @rule(actor_id=st.sampled_from(["d", "e", "p", "a-d", "a-e", "a-p", EDGE]))
    def cut_off(self, actor_id):
        """Links to an actor break: what was on them is lost, everyone else thinks that it died."""
        self.world.lose(actor_id)
        self.world.members()

    @invariant()
    def every_page_is_in_one_book(self):
        for core in self.world.cores.values():
            assert core.books.cache.check() == []

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()
            self.world.advance(self.world.now + 40)
            self.world.settle()
            self.world.check()


Handoffs.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHandoffs = Handoffs.TestCase
