"""A scheduler's gauges for `/metrics`, and the check that nothing is held when nothing runs.

vLLM's names are made from these by the gateway: requests running and waiting, cache usage (pages not free or only
cached, of all), prefix cache queries and hits, preemptions, prompt and generation tokens.
"""

from typing import Protocol

from kvstore.cache.allocator import PageState
from nodes.scheduler.books import Books
from nodes.scheduler.cache_news import CacheNews
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.results import Results
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.own_grants import OwnGrants
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.queue.admission import Admission
from nodes.scheduler.queue.turnover import Turnover
from nodes.scheduler.rpc_handlers import RpcHandlers
from nodes.scheduler.sequence import Stage
from nodes.scheduler.storing import PagesToStore
from nodes.scheduler.worker_link.pipeline import Pipeline

OWNERSHIP = (
    PageState.FREE,
    PageState.CACHED,
    PageState.RUNNING,
    PageState.GRANTED,
    PageState.IN_FLIGHT,
    PageState.QUARANTINED,
)


class Parts(Protocol):
    """The parts of the core that are read here."""

    books: Books
    turnover: Turnover
    own_grants: OwnGrants
    grants: DecodeHandoffQueue
    restores: RestoreQueue
    orders: PrefillHandoffQueue
    pipeline: Pipeline
    endings: Endings
    results: Results
    admission: Admission
    handlers: RpcHandlers
    news: CacheNews
    storing: PagesToStore


def gauges(core: Parts) -> dict[str, float]:
    """Figures of this moment; names that end in `_total` only rise."""
    books, pipeline, grants, orders = core.books, core.pipeline, core.grants, core.orders
    cache = books.cache
    figures: dict[str, float] = {
        f'mesh_scheduler_pages{{state="{state.name.lower()}"}}': cache.num_pages_in(state) for state in OWNERSHIP
    }
    used = cache.num_pages - cache.num_available()
    figures |= {
        "mesh_scheduler_num_running": len(books.running),
        "mesh_scheduler_num_waiting": len(books.queue),
        "mesh_scheduler_num_handoffs": len(books.lent(Stage.HANDOFF)),
        "mesh_scheduler_lacks_pages": core.admission.lacks_pages,
        "mesh_scheduler_num_recovered": len(books.recovered),
        "mesh_scheduler_num_leaving": books.running.num_leaving,
        "mesh_scheduler_num_orders": len(orders),
        "mesh_scheduler_num_grants_closing": core.own_grants.num_closing,
        "mesh_scheduler_num_finished_kept": books.attempts.num_finished,
        "mesh_scheduler_steps_in_flight": pipeline.num_inflight,
        "mesh_scheduler_worker_adopted": pipeline.adopted is not None,
        "mesh_scheduler_num_pages": cache.num_pages,
        "mesh_scheduler_kv_usage_ratio": used / cache.num_pages,
        "mesh_scheduler_load_tokens": used * cache.page_size + books.queue.num_tokens(),
        "mesh_scheduler_steps_total": pipeline.last_step,
        "mesh_scheduler_workers_fenced_total": pipeline.num_fenced,
        "mesh_scheduler_step_mismatches_total": pipeline.num_mismatches,
        "mesh_scheduler_repeated_steps_total": pipeline.num_repeated_steps,
        "mesh_scheduler_prompt_tokens_total": core.handlers.num_prompt_tokens,
        "mesh_scheduler_output_tokens_total": core.results.num_output_tokens,
        "mesh_scheduler_vectors_total": core.results.num_vectors,
        "mesh_scheduler_computed_tokens_total": core.results.num_computed_tokens,
        "mesh_scheduler_prefix_query_tokens_total": cache.num_query_tokens,
        "mesh_scheduler_prefix_hit_tokens_total": cache.num_hit_tokens,
        "mesh_scheduler_evicted_pages_total": cache.blocks.num_evicted_pages,
        "mesh_scheduler_cache_restatements_total": core.news.num_restated,
        "mesh_scheduler_page_violations_total": cache.blocks.num_violations,
        'mesh_scheduler_requests_total{outcome="finished"}': core.endings.num_finished,
        'mesh_scheduler_requests_total{outcome="cancelled"}': core.endings.num_cancelled,
        'mesh_scheduler_requests_total{outcome="failed"}': core.endings.num_failed,
        'mesh_scheduler_handoffs_total{outcome="done"}': grants.num_done,
        'mesh_scheduler_handoffs_total{outcome="failed"}': grants.num_failed,
        'mesh_scheduler_orders_total{outcome="done"}': orders.num_done,
        'mesh_scheduler_orders_total{outcome="failed"}': orders.num_failed,
        "mesh_preemptions_total": books.running.num_preemptions,
        "mesh_scheduler_clients": books.queue.shares.num_active,
        "mesh_scheduler_put_back_total": core.turnover.num_put_back,
        "mesh_scheduler_over_share_total": core.handlers.num_over_share,
        "mesh_recomputed_tokens_total": core.admission.num_recomputed_tokens + pipeline.num_recomputed_tokens,
    }
    figures |= {
        f'mesh_scheduler_results_refused_total{{reason="{reason}"}}': number
        for reason, number in pipeline.num_refused.items()
    }
    figures |= core.storing.gauges()
    figures |= core.restores.gauges()
    return {name: float(value) for name, value in figures.items()}


def leaks(core: Parts) -> list[str]:
    """What is held although nothing runs; empty if all is well. Linear in the pool, so not for every step."""
    books, cache = core.books, core.books.cache
    counts = {
        "running sequences": len(books.running),
        "leaving sequences": books.running.num_leaving,
        "waiting sequences": len(books.queue),
        "clients": books.queue.shares.num_active,
        "loans": len(books.loans),
        "grants being closed": core.own_grants.num_closing,
        "orders": len(core.orders),
        "slots of the worker's table": books.running.slots.num_taken,
        "steps in flight": core.pipeline.num_inflight,
        "attempts neither running nor finished": len(books.attempts) - books.attempts.num_finished,
        "asks without an answer": len(books.asks) + len(core.grants.cancels),
        "recovered": len(books.recovered),
        "page handles": cache.num_sequences,
    }
    counts |= {f"{state.name.lower()} pages": cache.num_pages_in(state) for state in OWNERSHIP[2:]}
    found = [f"{number} {what}" for what, number in counts.items() if number]
    found += [f"page {mismatch.page} is {mismatch.found}, should be {mismatch.needed}" for mismatch in cache.check()]
    if cache.num_available() != cache.num_pages:
        found.append(f"{cache.num_pages - cache.num_available()} pages neither free nor evictable")
    return found
