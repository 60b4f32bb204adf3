"""One stage draws for every backend: edits in their order, what is read, and rows that fail alone."""

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.asks import Editor, RowReads
from nodes.asks.edits import RowEdits
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.request import Sampling
from nodes.worker.draw.edits import EDITOR_FAILED, NOTHING_LEFT, first_allowed
from nodes.worker.draw.measuring import measured, payloads
from nodes.worker.draw.reads import certain
from nodes.worker.draw.sampler import NO_CANDIDATE, Draw, sample
from nodes.worker.draw.stage import Draws
from nodes.worker.steps.step import POISONED, Rows, RunnableRow, StepOutcome
from tests.nodes.worker.native_builds import NAMES
from tests.nodes.worker.native_rows import all_builds, check_builds, read_by, rows_of_build
from tests.nodes.worker.torch_running import GREEDY, asking, sequence_of

SIZE = 2500


class Says(Editor):
    """Calls `edit` with what an editor is given."""

    def __init__(self, edit: Callable[[list[int], int, RowEdits], None]) -> None:
        self._edit = edit

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        self._edit(list(history), position, edits)


class Panic(BaseException):
    """As an extension's panic is: no Exception."""


def only(*ids: int, words: int = 40) -> Editor:
    """Allows these ids alone."""

    def edit(_: list[int], __: int, edits: RowEdits) -> None:
        edits.mask = mask_of(*ids, words=words)

    return Says(edit)


def mask_of(*ids: int, words: int = 40) -> bytes:
    bits = np.zeros(32 * words, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def raising(error: BaseException) -> Editor:
    def edit(_: list[int], __: int, ___: RowEdits) -> None:
        raise error

    return Says(edit)


def rows_of(*ones: Any, draws: Sequence[int] | None = None) -> Rows:
    """A row of one token at position 4 for each sequence."""
    rows = [
        RunnableRow(10 + i, one, 4, 1, i, i, 1 if draws is None else draws[i], history=array("i", [5, 6, 7, 8, 9]))
        for i, one in enumerate(ones)
    ]
    return Rows.of(rows)


def random_logits(num_rows: int, size: int = SIZE, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def outcomes(rows: Rows, logits: torch.Tensor) -> list[StepOutcome]:
    """From logits alone, with a backend's own most likely tokens, as a device does, and by the native library."""
    likely = array("i", sample(logits, [Draw(GREEDY, 0)] * len(logits)).tolist())
    tokens, lines = Draws(rows).on_device(logits)
    draws = Draws(rows)
    found = [draws.on_host(logits), Draws(rows).on_host(logits, likely), draws.outcome(tokens.tolist(), lines)]
    return found + [Draws(rows).on_host(logits, likely, own) for own in all_builds()]


def test_every_backend_gets_the_same_outcome_of_rows_of_all_kinds() -> None:
    rows = rows_of(
        sequence_of(GREEDY),
        sequence_of(Sampling(seed=3)),
        sequence_of(GREEDY, 1, only(70, 71)),
        sequence_of(GREEDY, 1, raising(ValueError("no such state"))),
        sequence_of(Sampling(seed=4, top_p=0.5), 1, only(3, 4, 5)),
        sequence_of(GREEDY, reads=RowReads(3)),
        sequence_of(GREEDY),
        sequence_of(asking(RepetitionPenalty(5.0), temperature=0.0)),
    )
    logits = random_logits(8)
    logits[6, 8] = math.nan
    logits[7, [8, 30]] = torch.tensor([50.0, 20.0])
    first, *others = outcomes(rows, logits)
    assert others == [first] * len(others)
    assert first.token_ids[0] == logits[0].argmax()
    assert first.token_ids[2] == (70 if logits[2, 70] > logits[2, 71] else 71)
    assert first.token_ids[4] in (3, 4, 5)
    assert first.token_ids[7] == 30, "8 is in the history: its 50 counts as 10"
    assert [(error.row, error.code) for error in first.errors] == [(13, EDITOR_FAILED), (16, POISONED)]
    assert [bool(extra) for extra in first.extras] == [i == 5 for i in range(8)]


@pytest.mark.parametrize("error", [ValueError("bad"), Panic("called `unwrap()`"), RecursionError(), GeneratorExit()])
def test_an_editor_that_raises_anything_fails_its_row_alone(error: BaseException) -> None:
    rows = rows_of(sequence_of(GREEDY), sequence_of(GREEDY, 1, raising(error)), sequence_of(Sampling(seed=1)))
    for outcome in outcomes(rows, random_logits(3)):
        assert [one >= 0 for one in outcome.token_ids] == [True, False, True]
        (failed,) = outcome.errors
        assert (failed.row, failed.code) == (11, EDITOR_FAILED)
        assert failed.message == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_no_editors_failure(error: type[BaseException]) -> None:
    with pytest.raises(error):
        Draws(rows_of(sequence_of(GREEDY, 1, raising(error()))))


def test_edits_that_leave_nothing_fail_their_row_and_the_model_is_not_blamed() -> None:
    nothing = [only(), only(SIZE + 1, words=90), Says(lambda _, __, edits: edits.floor.update(range(SIZE)))]
    rows = rows_of(*(sequence_of(Sampling(seed=1), 1, one) for one in nothing), sequence_of(GREEDY))
    for outcome in outcomes(rows, random_logits(4)):
        assert [(error.row, error.code) for error in outcome.errors] == [(i, NOTHING_LEFT) for i in (10, 11, 12)]
        assert outcome.token_ids[3] >= 0


def test_an_editor_is_asked_with_the_tokens_so_far_for_rows_that_draw_only() -> None:
    asked: list[tuple[list[int], int]] = []
    one = sequence_of(GREEDY, 3, Says(lambda history, position, _: asked.append((history, position))))
    draws = Draws(rows_of(one, one, draws=[1, 0]))
    assert asked == [([5, 6, 7, 8, 9], 2)]
    assert not draws.wants_logits, "nothing was edited"
    assert draws.on_host(None, array("i", [44])) == StepOutcome([44, -1], [], extras=[])


IDS = st.one_of(st.integers(0, 70), st.integers(-3, 2**31 - 1))
VALUES = st.sampled_from([-7.5, -0.3, 0.5, 2.0, 30.0])


@st.composite
def all_edits(draw: st.DrawFn) -> RowEdits:
    edits = RowEdits()
    if draw(st.booleans()):
        mask = draw(st.binary(min_size=4, max_size=16).map(lambda data: data[: len(data) // 4 * 4]))
        edits.mask = draw(st.sampled_from([bytes, bytearray, memoryview]))(mask)
    edits.floor = draw(st.sets(IDS, max_size=9))
    edits.bias, edits.add = (draw(st.dictionaries(IDS, VALUES, max_size=6)) for _ in range(2))
    edits.scale = draw(st.dictionaries(IDS, st.sampled_from([0.5, 1.7, 9.0]), max_size=6))
    return edits


def edited(logits: list[float], edits: RowEdits) -> list[float]:
    """The edits one after the other, in float32."""
    values = [np.float32(value) for value in logits]
    mask = None if edits.mask is None else np.unpackbits(np.frombuffer(edits.mask, np.uint8), bitorder="little")
    for token in range(len(values)):
        if token in edits.floor or (mask is not None and (token >= len(mask) or not mask[token])):
            values[token] = np.float32(-math.inf)
        values[token] += np.float32(edits.bias.get(token, 0.0))
        scale = np.float32(edits.scale.get(token, 1.0))
        values[token] = values[token] * scale if values[token] < 0 else values[token] / scale
        values[token] += np.float32(edits.add.get(token, 0.0))
    return [float(value) for value in values]


@settings(max_examples=80, deadline=None)
@given(st.lists(all_edits(), min_size=1, max_size=4), st.integers(1, 80), st.integers(0, 2**32))
def test_edits_are_applied_in_their_order_by_all_samplers(several: list[RowEdits], size: int, seed: int) -> None:
    logits = random_logits(len(several), size, seed)
    draws = [Draw(GREEDY, 0, edits) for edits in several]
    drawn = sample(logits, draws).tolist()
    assert not check_builds(logits, draws, drawn), "the most likely token needs no `exp`"
    for row, edits, token in zip(logits.tolist(), several, drawn, strict=True):
        values = edited(row, edits)
        assert token == (values.index(max(values)) if max(values) > -math.inf else NO_CANDIDATE)
    random = [Draw(Sampling(seed=i), i, edits) for i, edits in enumerate(several)]
    tokens = sample(logits, random).tolist()
    check_builds(logits, random, tokens)
    for row, edits, token in zip(logits.tolist(), several, tokens, strict=True):
        assert token == NO_CANDIDATE or edited(row, edits)[token] > -math.inf


def unpacked(payload: bytes, top: int) -> tuple[float, int, list[tuple[int, float]], list[float]]:
    logprob, rank = struct.unpack_from("<fi", payload)
    pairs = [struct.unpack_from("<if", payload, 8 + 8 * i) for i in range(top)]
    ids = payload[8 + 8 * top :]
    return logprob, rank, pairs, list(struct.unpack(f"<{len(ids) // 4}f", ids))


def lines_of(
    how: str, logits: torch.Tensor, tokens: torch.Tensor, draws: list[Draw], reads: list[RowReads]
) -> torch.Tensor:
    if how == "torch":
        return measured(logits, tokens, draws, reads)
    return read_by(rows_of_build(how), logits, tokens.tolist(), draws, reads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["torch", *NAMES])
def test_what_is_read_is_a_log_softmax_with_ties_in_the_order_of_ids(how: str, dtype: torch.dtype) -> None:
    logits = random_logits(6).round().to(dtype)
    logits[2, 5:900] = -math.inf
    logits[4, 17] = -0.0
    wanted = [RowReads(top, tuple(ids)) for top, ids in ((0, []), (5, [7, SIZE, -1]), (20, [6]))] * 2
    tokens = torch.tensor([0, 7, 1000, 30, 17, 5])
    found = payloads(lines_of(how, logits, tokens, [Draw(GREEDY, 0)] * 6, wanted), wanted)
    for row, token, reads, payload in zip(logits.double(), tokens.tolist(), wanted, found, strict=True):
        logs = torch.log_softmax(row, -1).tolist()
        order = sorted(range(SIZE), key=lambda i: (-logs[i], i))
        logprob, rank, top, ids = unpacked(payload, reads.top)
        assert logprob == pytest.approx(logs[token], abs=1e-5)
        assert rank == order.index(token) + 1
        assert [one for one, _ in top] == order[: reads.top]
        assert [log for _, log in top] == pytest.approx([logs[one] for one in order[: reads.top]], abs=1e-5)
        expected = [logs[one] if 0 <= one < SIZE else -9999.0 for one in reads.ids]
        assert ids == pytest.approx([max(one, -9999.0) for one in expected], abs=1e-5)


@pytest.mark.parametrize("how", ["torch", *NAMES])
def test_what_is_read_does_not_depend_on_the_rows_beside_it(how: str) -> None:
    logits = random_logits(40, 20_000)
    edits = RowEdits()
    edits.mask, edits.bias = mask_of(*range(0, 1000, 3), words=40), {3: 2.0}
    draws = [Draw(Sampling(temperature=0.5, seed=i), i, edits if i % 3 else None) for i in range(40)]
    wanted = [RowReads(i % 21, tuple(range(i % 4)), "processed" if i % 2 else "raw") for i in range(40)]
    tokens = sample(logits, draws)
    together = payloads(lines_of(how, logits, tokens, draws, wanted), wanted)
    for i in range(40):
        at = slice(i, i + 1)
        assert payloads(lines_of(how, logits[at], tokens[at], draws[at], wanted[at]), wanted[at]) == together[at]
    for i in (1, 7):
        values = torch.tensor(edited(logits[i].tolist(), edits)) / 0.5
        logprob, _, top, _ = unpacked(together[i], wanted[i].top)
        logs = torch.log_softmax(values.double(), -1)
        assert logprob == pytest.approx(float(logs[tokens[i]]), abs=1e-5)
        assert all(token % 3 == 0 and token < 1000 for token, _ in top)
    never = [log for _, log in unpacked(together[1], 1)[2]]
    assert never != [-9999.0]


def test_what_a_certain_token_reads_needs_no_logits() -> None:
    reads = RowReads(3, (1, 9))
    assert unpacked(certain(1, reads), 3) == (0.0, 1, [(1, 0.0), (0, -9999.0), (2, -9999.0)], [0.0, -9999.0])
    assert certain(7, RowReads()) == struct.pack("<fi", 0.0, 1)


def test_the_first_token_that_mask_and_floor_allow() -> None:
    edits = RowEdits()
    edits.floor = {0, 1, 5}
    assert first_allowed([5, 6], edits) == 6
    assert first_allowed([5, 1], edits) == 2
    edits.mask = mask_of(1, 33, words=2)
    assert first_allowed([5, 33], edits) == 33
    assert first_allowed([64, 2**31 - 1], edits) == 33
    edits.floor.add(33)
    assert first_allowed([33], edits) == -1


def test_rows_that_all_draw_get_their_own_tokens_in_whatever_order_their_logits_come() -> None:
    rows = rows_of(sequence_of(GREEDY), sequence_of(GREEDY))
    logits = random_logits(2)
    first, second = logits.argmax(-1).tolist()
    assert Draws(rows, [1, 0]).on_host(logits).token_ids == [second, first]
