"""Settings of one scheduler. Made by `cli` from the topology."""

from typing import Final, Literal

import msgspec

from kvstore.cache.eviction import EvictionName

Phase = Literal["prefill", "decode", "mixed"]
PolicyName = Literal["fcfs", "longest_prefix", "depth_first", "shortest_first", "priority", "random"]

StorePolicy = Literal["write_through", "write_through_selective"]
"""When a page is kept on disk: as soon as it is full, or once a second request uses it; named as HiCache names them."""

MAX_PIPELINE_DEPTH: Final = 2
"""One step runs and one waits for its turn. A third would only come later to what the first one draws."""
MAX_PLAN_HORIZON_S: Final = 10.0
"""A new request waits as long. Beyond a second nothing is gained: plans have at most eight steps."""


class ConfigError(ValueError):
    """A setting contradicts another one; the message says which and what to set."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler and the worker group it drives. All `_s` are seconds.

    `phase` is announced for routing; any scheduler serves any phase that it is asked for. `worker` and `agent` are
    actor ids; `workers` are those of all tensor-parallel ranks, `worker` first, or empty if it is the only one. A step
    holds at most `step_tokens` tokens, of one prompt at most `chunk_tokens` (a multiple of the page). While sequences
    decode, only so many prompt tokens join a step that it takes about `max_step_s` (`step_pace.py`); 0: as many as
    there is room for.
    A step hangs, and its worker ends, if it takes longer than `step_times.py` derives from earlier steps: at least
    `step_deadline_s`, plus `token_deadline_s` for each of its tokens if nothing like it was measured.
    `is_encoder`: a position of the model sees the whole prompt, so that a prompt is computed in one row and its pages
    are of no use to others. `chunk_tokens` and `step_tokens` have room for the longest then.
    `local_prefill_max`: a prompt with at most so many uncached tokens is prefilled here even if a prefill scheduler is
    named.
    `stores`: when the agent is told of pages to keep on disk; empty: it keeps none.
    """

    group: str
    worker: str
    agent: str
    context_length: int
    phase: Phase = "mixed"
    eos_token_ids: tuple[int, ...] = ()
    page_size: int = 16

    step_tokens: int = 512
    chunk_tokens: int = 256
    max_step_s: float = 0.0
    plan_horizon_s: float = 0.01
    """Of the steps that a worker is sent at once while a batch decodes and nothing else is to be done.

    At most 8, fewer if they take longer, one at 6 ms a step: what comes meanwhile, or is cancelled, waits as long. 0:
    one step at a time."""
    max_running: int = 256
    max_waiting: int = 2048
    """Requests that wait; more are refused."""
    max_orders: int = 1024
    """Prefills held for others."""
    max_finished: int = 4096
    """Ended attempts kept for repeats."""
    pipeline_depth: int = MAX_PIPELINE_DEPTH
    """Steps on their way; 1: none is planned ahead."""
    local_prefill_max: int = 64
    policy: PolicyName = "fcfs"
    """Who goes next: `fcfs`, `longest_prefix`, `depth_first`, `shortest_first`, `priority` or `random`."""
    starvation_s: float = 5.0
    """After it a waiting request has a turn, whatever `policy` says."""
    eviction: EvictionName = "lru"
    """Which cached prefixes go first: `lru` least recently used, `lfu` least often, `fifo` oldest."""

    handoff_timeout_s: float = 60.0
    """Of a prefill elsewhere, with its copies; then the rest is prefilled where it is decoded."""
    lease_s: float = 10.0
    """Without a sign of life, after which pages held for another actor are given back."""
    step_deadline_s: float = 30.0
    token_deadline_s: float = 0.5
    worker_lost_timeout_s: float = 60.0
    """For which requests wait for a worker that died; more if it takes longer to load."""
    drained_wait_s: float = 15.0
    """For which requests wait for a worker that was drained."""
    workers: tuple[str, ...] = ()
    is_encoder: bool = False
    stores: StorePolicy | Literal[""] = ""

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.workers or (self.worker,)

    def __post_init__(self) -> None:
        if self.chunk_tokens < self.page_size or self.chunk_tokens % self.page_size:
            raise ConfigError(
                f"chunk_tokens {self.chunk_tokens} is not a positive multiple of the page size {self.page_size}"
            )
        if self.step_tokens < self.max_running + self.page_size:
            # Decode rows go first; without room beside them a full batch would block prefill for good.
            raise ConfigError(
                f"step_tokens {self.step_tokens} leaves no room for a page beside max_running {self.max_running} "
                f"decode rows: set step_tokens to at least {self.max_running + self.page_size}, or lower max_running"
            )
        if self.is_encoder and min(self.chunk_tokens, self.step_tokens) < self.context_length:
            raise ConfigError(
                f"an encoder's prompts are computed whole: chunk_tokens {self.chunk_tokens} and step_tokens"
                f" {self.step_tokens} must be at least its context, {self.context_length}"
            )
        if not 1 <= self.pipeline_depth <= MAX_PIPELINE_DEPTH:
            raise ConfigError(f"pipeline_depth must be 1 or {MAX_PIPELINE_DEPTH}, not {self.pipeline_depth}")
        if not 0 <= self.plan_horizon_s <= MAX_PLAN_HORIZON_S:
            raise ConfigError(
                f"plan_horizon_s must be between 0 and {MAX_PLAN_HORIZON_S:g} s, not {self.plan_horizon_s:g}: for so"
                " long a new request waits behind steps that were sent before it came"
            )
        if self.workers and (self.workers[0] != self.worker or len(set(self.workers)) < len(self.workers)):
            raise ConfigError(
                f"workers must list {self.worker} first, and each worker only once, not {', '.join(self.workers)}"
            )
        if self.context_length < 2:
            raise ConfigError("context_length must be at least 2: one prompt token and one output token")
