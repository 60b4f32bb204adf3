"""The echo model answers out of the pages, whatever the chunks, and sees a page that is not its own."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layout import KVLayout
from nodes.asks import RowReads
from nodes.asks.edits import RowEdits
from nodes.asks.min_tokens import MinTokens
from nodes.model_spec import EchoTimings, resolve_model
from nodes.request import Sampling
from nodes.worker.draw.reads import certain
from nodes.worker.executor.echo import EchoRunner
from nodes.worker.steps.step import CORRUPT_PAGE, Rows, RunnableRow, RunnableStep, StepOutcome
from tests.nodes.worker.torch_running import asking, sequence_of

SPEC = resolve_model("echo")
EOS = SPEC.eos_token_ids[0]
PLAIN = Sampling()


def make(num_pages: int = 40, page_size: int = 4) -> tuple[EchoRunner, bytearray]:
    layout = SPEC.kv_layout(page_size=page_size)
    pages = bytearray(num_pages * layout.page_bytes)
    return EchoRunner(pages, layout, EOS, EchoTimings(step_ms=2.0, token_us=500.0)), pages


def step(*rows: tuple[int, list[int], list[int], int], sample: bool = True, sampling: Sampling = PLAIN) -> RunnableStep:
    """Rows of (start, token ids, pages, prompt length)."""
    tokens, pages, result = array("i"), array("i"), []
    for index, (start, ids, row_pages, prompt) in enumerate(rows):
        draws = int(sample and start + len(ids) >= prompt)
        one = sequence_of(sampling, prompt)
        result.append(RunnableRow(index, one, start, len(ids), len(tokens), len(pages), draws))
        tokens.extend(ids)
        pages.extend(row_pages)
    return RunnableStep(1, Rows.of(result), tokens, pages)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_output_is_the_prompt_then_the_end_then_the_prompt_again(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=20))
    pages = data.draw(st.permutations(range(1, 40)))[:12]
    runner, _ = make()
    ids, start, output = list(prompt), 0, []
    while start < len(prompt):
        size = data.draw(st.integers(1, len(prompt) - start))
        outcome = runner.run(step((start, ids[start : start + size], pages, len(prompt))))
        start += size
        assert not outcome.errors
        assert outcome.delay_s == pytest.approx(0.002 + 0.0005 * size)
    output = list(outcome.token_ids)
    for _ in range(20):
        ids.append(output[-1])
        output += runner.run(step((len(ids) - 1, ids[-1:], pages, len(prompt)))).token_ids
    assert output == [*prompt, EOS, *prompt, EOS, *prompt, EOS, *prompt, EOS, *([*prompt, EOS] * 20)][: len(output)]


def test_a_masked_token_gives_way_to_the_next_that_may_be_drawn_until_min_tokens() -> None:
    prompt = [7, 8, 9]
    pages = [3, 4, 5, 6]

    def answers(masked: list[int], min_tokens: int, count: int) -> list[int]:
        runner, _ = make()
        sampling = asking(MinTokens(min_tokens, masked))
        ids, start = list(prompt), 0
        while len(ids) < len(prompt) + count:
            outcome = runner.run(step((start, ids[start:], pages, len(prompt)), sampling=sampling))
            assert not outcome.errors
            start = len(ids)
            ids += outcome.token_ids
        return ids[len(prompt) :]

    assert answers([EOS], 5, 8) == [7, 8, 9, 7, 7, 8, 9, EOS]
    assert answers([EOS], 3, 4) == [7, 8, 9, EOS]
    assert answers([8, EOS], 9, 5) == [7, 9, 9, 7, 7]
    assert answers([0, 7, 8, 9, EOS], 2, 3) == [1, 1, 9], "nothing of the prompt may be said"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_batch_that_decodes_is_answered_as_its_rows_are(data: st.DataObject) -> None:
    """By columns and row by row: the same tokens, the same bytes in the pages, the same complaints."""
    runner, pages = make(page_size=4)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=9), min_size=1, max_size=5))
    places = [[1 + 7 * index + at for at in range(7)] for index in range(len(prompts))]
    rows = [(0, ids, place, len(ids)) for ids, place in zip(prompts, places, strict=True)]
    drawn = runner.run(step(*rows)).token_ids
    tokens = [list(ids) for ids in prompts]
    for _ in range(data.draw(st.integers(1, 14))):
        for ids, token_id in zip(tokens, drawn, strict=True):
            ids.append(token_id)
        if data.draw(st.integers(0, 9)) == 0:
            at = data.draw(st.integers(0, len(pages) - 1))
            pages[at] ^= 0xFF
        rows = [(len(ids) - 1, ids[-1:], place, row[3]) for ids, place, row in zip(tokens, places, rows, strict=True)]
        singly = step(*rows)
        given = singly.rows
        columns = (given.found, given.starts, given.counts, given.token_offsets, given.page_offsets)
        before = bytes(pages)
        one_by_one, left = runner.run(singly), bytes(pages)
        pages[:] = before
        assert runner.run(singly._replace(rows=Rows(*columns))) == one_by_one
        assert pages == left
        drawn = [max(0, token_id) for token_id in one_by_one.token_ids]


def test_prefill_without_sampling_draws_nothing() -> None:
    runner, _ = make()
    assert runner.run(step((0, [5, 6], [3], 9))).token_ids == [-1]


def test_pages_of_another_sequence_are_noticed() -> None:
    runner, pages = make()
    outcome = runner.run(step((0, list(range(10)), [5, 9, 2], 10), (0, list(range(100, 107)), [7, 8, 6], 7)))
    assert outcome.token_ids == [0, 100]
    before = bytes(pages)
    # A page that was never written, at the handoff's first decode step.
    outcome = runner.run(step((10, [0], [5, 30, 2], 10), (7, [100], [7, 8, 6], 7)))
    assert [(error.row, error.code) for error in outcome.errors] == [(0, CORRUPT_PAGE)]
    assert outcome.token_ids == [-1, 101]
    pages[:] = before
    # Pages of the right positions and the wrong sequence: the text tells.
    assert runner.run(step((10, [0], [7, 9, 2], 10))).token_ids == [101]


def test_a_page_that_goes_bad_later_is_noticed_when_it_is_read() -> None:
    runner, pages = make()
    prompt = list(range(10))
    runner.run(step((0, prompt, [5, 9, 2], 10)))
    ids = [*prompt, 0, 1, 2]
    for position in (10, 11):
        assert runner.run(step((position, [ids[position]], [5, 9, 2], 10))).errors == []
    runner.run(step((12, [2], [5, 9, 2, 3], 10)))
    pages[5 * 32 + 16 : 5 * 32 + 20] = b"\xff\xff\xff\xff"
    outcome = runner.run(step((13, [3], [5, 9, 2, 3], 10)))
    assert outcome.errors == []  # output token 4 lies in the second page
    pages[9 * 32 + 16] ^= 1
    outcome = runner.run(step((13, [3], [5, 9, 2, 3], 10)))
    assert [error.message for error in outcome.errors] == ["page 9 does not hold positions 4 to 7 of this sequence"]


def test_steps_are_idempotent() -> None:
    runner, pages = make()
    first = step((0, [1, 2, 3, 4, 5], [3, 4], 5))
    outcome, bits = runner.run(first), bytes(pages)
    assert runner.run(first) == outcome
    assert bytes(pages) == bits


def test_layout_must_be_echo_s() -> None:
    with pytest.raises(ValueError, match="8 bytes"):
        EchoRunner(bytearray(), KVLayout(num_layers=2, num_kv_heads=1, head_dim=1), EOS, EchoTimings())


class Editing:
    """Masks and floors what it is told, and notes how it was asked."""

    def __init__(self, allowed: list[int] | None, floor: set[int]) -> None:
        self.allowed, self.floor = allowed, floor
        self.asked: list[tuple[list[int], int]] = []

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        self.asked.append((list(history), position))
        edits.floor |= self.floor
        if self.allowed is not None:
            edits.mask = sum(1 << one for one in self.allowed).to_bytes(64, "little")


def test_edits_choose_among_what_echo_proposes_and_a_row_that_they_leave_nothing_fails() -> None:
    def run(editor: Editing, reads: RowReads | None = None) -> StepOutcome:
        runner, _ = make()
        tokens, pages = array("i", [7, 8, 9]), array("i", [3])
        one = sequence_of(PLAIN, 3, editor, reads=reads)
        rows = Rows.of([RunnableRow(0, one, 0, 3, 0, 0, history=tokens)])
        return runner.run(RunnableStep(1, rows, tokens, pages))

    editor = Editing([8, 9, 30], {8})
    assert run(editor).token_ids == [9]
    assert editor.asked == [([7, 8, 9], 0)]
    assert run(Editing([30, 40], set())).token_ids == [30]
    failed = run(Editing([30], {30}))
    assert failed.token_ids == [-1]
    assert [error.code for error in failed.errors] == ["nothing_left"]
    assert run(Editing([30], set()), RowReads(1)).extras == [certain(30, RowReads(1))]
