"""What becomes of a rank whose model cannot be loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.pool.page_pool import HeapHost
from nodes.model_spec import resolve_model
from nodes.worker.errors import CollectiveFailed, GroupNotFormed
from nodes.worker.executor.runners import make_runner
from nodes.worker.ops.torch import load
from tests.nodes.worker.recorded_worker import config, pool

MODEL = "random:tiny-llama"


@pytest.mark.parametrize(
    ("problem", "raised", "num_aborts"),
    [
        (
            CollectiveFailed("rank 1 is gone"),
            pytest.raises(GroupNotFormed, match="lost each other while they loaded"),
            0,
        ),
        (MemoryError("too large"), pytest.raises(MemoryError), 1),
    ],
)
def test_others_do_not_wait_for_a_rank_that_could_not_load(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, raised: Any, num_aborts: int
) -> None:
    aborts: list[None] = []

    def fail(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(load, "load_host_runner", fail)
    host = HeapHost()
    spec = resolve_model(MODEL)
    mapped = host.open(pool(host, MODEL).path, writable=True)
    collectives: Any = SimpleNamespace(abort=lambda: aborts.append(None))
    with raised:
        make_runner(spec, config(MODEL), mapped, collectives)
    assert len(aborts) == num_aborts
