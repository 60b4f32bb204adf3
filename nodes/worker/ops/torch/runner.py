"""Runs steps over torch: lays out rows, forwards them (or replays a graph), draws tokens.

On the CPU one step follows the other. On a device `launch` queues a step on its stream and returns; `finish` waits for
its tokens. A step may be launched before the one before has finished: input tokens that the host does not know yet are
taken from where that step leaves its drawn tokens. That too works on any torch device, so that its logic can be tested
on the CPU.
"""

import gc
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.page_pool import PagePool
from nodes.protocol import RowError
from nodes.worker.cuda.graphs import DecodeGraphs
from nodes.worker.draw.prompt import TILE_ROWS, PromptReads
from nodes.worker.draw.sampler import NOT_DRAWN
from nodes.worker.draw.stage import Draws
from nodes.worker.ops.torch.attention import DeviceAttention
from nodes.worker.ops.torch.batch import (
    KNOWN,
    DeviceBatch,
    HostBatch,
    batch_types,
    first_rows,
    host_batch,
    pack,
    placed,
    unpack,
)
from nodes.worker.ops.torch.network import DeviceNetwork, HeadTiles
from nodes.worker.parallel.collectives import of_all_ranks
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.step import (
    PipelinedRunner,
    RemappableRunner,
    Rows,
    RunnableStep,
    StepOutcome,
    missing_input,
)
from nodes.worker.vectors.pooling import Head, VectorRows, no_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from nodes.worker.cuda.memory_saver import MemorySaver


class Launched(NamedTuple):
    """A step in flight. After `done`, `token_ids` (host, int64) has what the places of `draws` drew, `lines` what was
    read, `prompt_lines` what `prompt` read, `states` those that `vectors` are made of. `before` is the step launched
    just before, if rows of this one take their input from it.
    """

    rows: Rows
    draws: Draws
    token_ids: Tensor
    lines: Tensor | None
    done: "torch.cuda.Event | None"
    before: "Launched | None"
    prompt: PromptReads
    prompt_lines: Tensor | None
    vectors: VectorRows
    states: Tensor | None

    def drawn(self) -> list[int]:
        """What the places drew; waits."""
        if self.done is not None:
            self.done.synchronize()
        return cast("list[int]", self.token_ids.tolist())

    def unknown(self) -> dict[int, RowError]:
        """Errors of the rows whose input the step before did not draw, by index; waits for that step."""
        if self.before is None:
            return {}
        before = self.before
        numbers = [before.rows.numbers[index] for index in before.draws.places]
        known = {number for number, token in zip(numbers, before.drawn(), strict=True) if token >= 0}
        sources = enumerate(self.rows.sources)
        return {
            index: missing_input(self.rows[index]) for index, source in sources if source >= 0 and source not in known
        }


class TorchRunner(RemappableRunner):
    """A runner on the CPU, one step after the other. Synchronous; keeps no state between steps except the pages."""

    def __init__(
        self,
        network: DeviceNetwork,
        attention: DeviceAttention,
        page_size: int,
        numerics: str,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._network = network
        self._attention = attention
        self._page_size = page_size
        self._graphs = graphs
        self._device = network.device
        self.numerics = numerics
        self.head: Head = no_head
        """What comes behind a pooling. Set by the loader of this runner."""
        # How to compute over another pool (see `RemappableRunner`). Set by the loader of this runner.
        self.view_of: Callable[[PagePool], PoolView] = _view_of_host
        self.over: Callable[[PoolView], tuple[DeviceAttention, DecodeGraphs | None]] | None = None

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        """Raises CollectiveFailed for any failure in a group of ranks."""
        with of_all_ranks(self._network.collectives, f"step {step.step}"), torch.inference_mode():
            prompt, vectors = PromptReads(step.rows), VectorRows(step.rows)
            batch, logits = self._forward(step, prompt, vectors)
            outcome = prompt.beside(Draws(step.rows, batch.sampling).on_host(logits), prompt.lines())
            return self._with_vectors(outcome, vectors, self._network.take_states())

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, by the row's index in the plan; for tests."""
        with torch.inference_mode():
            batch, logits = self._forward(step)
            # A replayed graph writes its result to the same place each time.
            logits = logits.clone()
        return {step.rows.numbers[index]: logits[i] for i, index in enumerate(batch.sampling)}

    @override
    def unmap(self, *, backs_up: bool) -> None:
        """Graphs are dropped because they captured the pool's addresses; workspaces go with attention."""
        assert not backs_up, "host memory is not backed up in host memory"
        self._graphs = None
        del self._attention

    @override
    def remap(self, pool: PagePool) -> None:
        assert self.over is not None, "the loader did not say how to map another pool"
        with torch.inference_mode():
            self._attention, self._graphs = self.over(self.view_of(pool))

    def _with_vectors(self, outcome: StepOutcome, vectors: VectorRows, states: Tensor | None) -> StepOutcome:
        """The outcome with what `vectors` make of `states`, which are on the host by now."""
        if not vectors.has_any:
            return outcome
        assert states is not None, "a model that makes vectors pools"
        return vectors.beside(outcome, states.numpy(), self.head)

    def _forward(
        self, step: RunnableStep, prompt: PromptReads | None = None, vectors: VectorRows | None = None
    ) -> tuple[HostBatch, Tensor]:
        """The step's batch, and logits `[rows that draw, vocab]`; `prompt` takes those that it reads.

        The states that `vectors` read are left at the network.
        """
        batch = host_batch(step, self._page_size)
        pooled = None
        if vectors is not None and vectors.has_any:
            pooled = placed(np.array(vectors.places(first_rows(step)), np.int32), self._device)
        if prompt is not None and prompt.num:
            return batch, self._forward_reading(batch, prompt, first_rows(step), pooled)
        # None of the graphs pools.
        size = self._graphs.bucket_for(batch) if self._graphs is not None and pooled is None else 0
        batch = batch.padded(size) if size else batch
        arrays = self._resolved(batch, unpack(placed(pack(batch), self._device), batch.num_rows, len(batch.sampled)))
        if size and self._graphs is not None:
            logits = self._graphs.replay(batch, arrays)
            if _counts_up(batch.sampled):
                return batch, logits[: len(batch.sampled)]
            return batch, logits.index_select(0, arrays.sampled)
        self._attention.plan(batch, arrays)
        spec = self._network.spec
        types = placed(batch_types(step, spec), self._device) if spec.is_encoder else None
        return batch, self._network.forward(
            arrays.token_ids, arrays.positions, self._attention, arrays.sampled, pooled=pooled, types=types
        )

    def _forward_reading(
        self, batch: HostBatch, prompt: PromptReads, firsts: list[int], pooled: Tensor | None
    ) -> Tensor:
        """Logits as of `_forward`, without a graph: none has been captured for the rows that are read."""
        sampled = np.concatenate((batch.sampled, np.array(prompt.places(firsts), np.int32)))
        wide = batch._replace(sampled=sampled)
        arrays = self._resolved(wide, unpack(placed(pack(wide), self._device), wide.num_rows, len(sampled)))
        self._attention.plan(wide, arrays)
        tiles = HeadTiles(len(batch.sampled), TILE_ROWS, prompt.take)
        return self._network.forward(arrays.token_ids, arrays.positions, self._attention, arrays.sampled, tiles, pooled)

    def _resolved(self, batch: HostBatch, arrays: DeviceBatch) -> DeviceBatch:
        del batch
        return arrays


class DeviceRunner(TorchRunner, PipelinedRunner):
    """A runner of one device. Owns the device's stream; called from one thread, except `finish`."""

    def __init__(
        self,
        network: DeviceNetwork,
        attention: DeviceAttention,
        page_size: int,
        max_rows: int,
        numerics: str,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(network, attention, page_size, numerics, graphs)
        self._drawn = torch.full((max_rows,), NOT_DRAWN, dtype=torch.int64, device=self._device)
        self._last: Launched | None = None
        self._inputs: Tensor | None = None
        """What the step before drew for each row of this one, if that is all of them and each row draws itself."""
        self.saver: MemorySaver | None = None
        self._is_backed_up = False

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        return self.finish(self.launch(step))

    @override
    def launch(self, step: RunnableStep) -> Launched:
        """Raises CollectiveFailed for any failure in a group of ranks."""
        with of_all_ranks(self._network.collectives, f"step {step.step}"):
            return self._launch(step)

    def _launch(self, step: RunnableStep) -> Launched:
        with torch.inference_mode():
            prompt, vectors = PromptReads(step.rows), VectorRows(step.rows)
            batch, logits = self._forward(step, prompt, vectors)
            # Editors run while the device computes.
            draws = Draws(step.rows, batch.sampling)
            tokens, lines = self._draw(step, batch, draws, logits) if batch.sampling else (None, None)
            states = self._network.take_states()
            token_ids, (lines, prompt_lines, states), done = self._to_host(tokens, lines, prompt.lines(), states)
        before = self._last if max(step.rows.sources) >= 0 else None
        # The step before the previous one is not needed any more: without this, every step would keep all before it.
        before = before and before._replace(before=None)
        self._last = Launched(step.rows, draws, token_ids, lines, done, before, prompt, prompt_lines, vectors, states)
        return self._last

    @override
    def finish(self, launched: Launched) -> StepOutcome:
        """Raises CollectiveFailed if the ranks' group failed meanwhile."""
        drawn, unknown = launched.drawn(), launched.unknown()
        if self._network.collectives is not None:
            self._network.collectives.check()
        outcome = launched.draws.outcome(drawn, launched.lines, unknown)
        outcome = launched.prompt.beside(outcome, launched.prompt_lines)
        return self._with_vectors(outcome, launched.vectors, launched.states)

    @override
    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @override
    def unmap(self, *, backs_up: bool) -> None:
        self.synchronize()
        self._last = None
        super().unmap(backs_up=False)
        gc.collect()
        if self._device.type == "cuda":
            # Until then the memory of activations, workspaces and graphs is free for torch alone.
            torch.cuda.empty_cache()
        if backs_up:
            assert self.saver is not None, "weights cannot be backed up without a memory saver"
            self.saver.pause()
            self._is_backed_up = True

    @override
    def remap(self, pool: PagePool) -> None:
        if self._is_backed_up and self.saver is not None:
            self.saver.resume()
            self._is_backed_up = False
        super().remap(pool)
        self.synchronize()

    def _draw(self, step: RunnableStep, batch: HostBatch, draws: Draws, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Token ids of the rows that draw, and what is read of them.

        Tokens are also stored by their row's number in the plan, where the next step finds them.
        """
        tokens, lines = draws.on_device(logits)
        sources = batch.sources[batch.sampled]
        # A row that continues a failed one has failed too, however many steps are in flight.
        if self._inputs is not None and _counts_up(batch.sampled):
            # They are at hand. Each operation costs the host some 15 us, and it has 1.0 ms for a step of a small model.
            tokens = torch.where(self._inputs[: len(sources)] < 0, NOT_DRAWN, tokens)
        elif (sources != KNOWN).any():
            on_device = self._to_device(sources)
            before = self._drawn.index_select(0, on_device.clamp(min=0))
            tokens = torch.where((on_device != KNOWN) & (before < 0), NOT_DRAWN, tokens)
        numbers = np.array([step.rows.numbers[index] for index in batch.sampling], dtype=np.int64)
        # Otherwise a row that draws nothing would seem to have drawn what the row of its number drew in the last step.
        self._drawn.fill_(NOT_DRAWN)
        # As a rule rows draw in their order: then no numbers have to be sent to the device.
        if _counts_up(numbers):
            self._drawn[: len(numbers)].copy_(tokens)
        else:
            self._drawn.index_copy_(0, self._to_device(numbers), tokens)
        return tokens, lines

    @override
    def _resolved(self, batch: HostBatch, arrays: DeviceBatch) -> DeviceBatch:
        """The tokens that the previous step drew are filled in where the host does not know them."""
        # Those of the step before would be taken for this one's.
        self._inputs = None
        if (batch.sources == KNOWN).all():
            return arrays
        # A row that failed drew nothing: the row that continues it computes token 0 in vain, see `finish`.
        if batch.all_drawn:
            self._inputs = self._drawn.index_select(0, arrays.sources)
            return arrays._replace(token_ids=self._inputs.clamp(min=0).to(torch.int32))
        drawn = self._drawn.index_select(0, arrays.sources.clamp(min=0)).clamp_(min=0).to(torch.int32)
        return arrays._replace(token_ids=torch.where(arrays.sources == KNOWN, arrays.token_ids, drawn))

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return placed(array, self._device)

    def _to_host(
        self, tokens: Tensor | None, *beside: Tensor | None
    ) -> "tuple[Tensor, list[Tensor | None], torch.cuda.Event | None]":
        """Begin to copy all; returns the copies and an event that occurs when the step and these copies are done."""
        tokens = torch.empty(0, dtype=torch.int64) if tokens is None else tokens
        if self._device.type != "cuda":
            return tokens.clone(), list(beside), None
        copies = _copied(tokens), [None if one is None else _copied(one) for one in beside]
        # A thread that waits for it sleeps, instead of keeping a core busy.
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        return *copies, done


def _counts_up(numbers: npt.NDArray[np.generic]) -> bool:
    """Whether they are 0, 1, 2 and so on."""
    return bool((numbers == np.arange(len(numbers))).all())


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _view_of_host(pool: PagePool) -> PoolView:
    return PoolView(pool.pages_view, pool.layout)
