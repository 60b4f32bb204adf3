"""Rows of a step beside a plain reading of what each may be: every row is run with its tokens and pages, or blamed."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from nodes.asks import DrawnModel
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.steps.check import check_rows
from nodes.worker.steps.columns import Columns, Limits, read_columns
from nodes.worker.steps.sequence_table import SequenceTable
from tests.nodes.step_plans import Row, plan_of

LIMITS = Limits(num_pages=1000, page_size=4, vocab_size=50, context_length=30, max_batch_tokens=64)
PROMPT = 6
DRAWN_AT, DRAWN = 9, 33
ROW = st.builds(
    lambda start, tokens, num_pages, draws: Row(
        0, tokens, range(1, 1 + num_pages), start, PROMPT, Sampling() if draws else None
    ),
    st.integers(0, 28),
    st.one_of(
        st.lists(st.integers(0, 49), min_size=1, max_size=5), st.lists(st.integers(-2, 51), min_size=1, max_size=2)
    ),
    st.integers(0, 8),
    st.booleans(),
)


def of_slots(rows: list[Row]) -> list[Row]:
    """Each row in a slot of its own, with pages that no other has."""
    return [
        row._replace(slot=slot, sequence=100 + slot, pages=[10 * slot + page for page in row.pages])
        for slot, row in enumerate(rows, 1)
    ]


def blamed(row: Row, ahead: bool) -> str:
    """Why a row cannot be run; empty if it can."""
    end = row.start + len(row.tokens)
    if end > LIMITS.context_length or end > len(row.pages) * LIMITS.page_size or (row.sampling and end < PROMPT):
        return "bad_row"
    if list(row.tokens) == [-1]:
        return "" if row.start == DRAWN_AT or (ahead and row.start == DRAWN_AT + 1) else "missing_input"
    return "" if all(0 <= token < LIMITS.vocab_size for token in row.tokens) else "bad_row"


@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_each_row_is_run_as_it_is_or_blamed(drawn_rows: list[Row], ahead: bool) -> None:
    rows, table = of_slots(drawn_rows), SequenceTable(DrawnModel(1 << 16))
    plan, buffers = plan_of(1, rows)
    columns = read_columns(plan, buffers, LIMITS)
    found = table.apply(plan.opens, columns)
    for one in found:
        one.drawn_at, one.drawn = DRAWN_AT, DRAWN
    under_way = {row.slot: (row.sequence, 70 + row.slot, DRAWN_AT + 1) for row in rows} if ahead else {}
    checked = check_rows(LIMITS, columns, found, under_way)

    assert [(error.row, error.code) for error in checked.errors] == [
        (index, code) for index, row in enumerate(rows) if (code := blamed(row, ahead))
    ]
    good = [index for index, row in enumerate(rows) if not blamed(row, ahead)]
    assert [one.row for one in checked.rows] == good
    for one, row in zip(checked.rows, (rows[index] for index in good), strict=True):
        assert (one.start, one.num_tokens, one.sequence.num_prompt_tokens) == (row.start, len(row.tokens), PROMPT)
        assert one.sampling == row.sampling
        tokens = columns.token_ids[one.token_offset : one.token_offset + one.num_tokens].tolist()
        is_unknown = list(row.tokens) == [-1]
        is_ahead = is_unknown and row.start == DRAWN_AT + 1
        assert one.from_row == (70 + row.slot if is_ahead else -1)
        assert tokens == ([DRAWN] if is_unknown and not is_ahead else list(row.tokens))
        wanted = list(row.pages)[: -(-one.end // LIMITS.page_size)]
        assert checked.page_ids[one.page_offset :].tolist()[: len(wanted)] == wanted


def test_what_was_drawn_is_known_to_a_sequence_that_is_opened_again_and_to_nobody_else() -> None:
    """A step that is sent again opens its sequences; its input may be what the one before it drew."""
    table = SequenceTable(DrawnModel(1 << 16))

    def opened(sequence: int) -> tuple[int, int]:
        found = table.apply(
            [Open(3, sequence, 1, Sampling())],
            Columns([3], [sequence], [0], [1], [0], [0], [0], array("i", [5]), array("i")),
        )
        return found[0].drawn_at, found[0].drawn

    assert opened(8) == (-1, -1)
    table.record(Columns([3], [8], [4], [1], [1], [0], [0], array("i", [5]), array("i")), [41])
    table.record(Columns([3], [7], [6], [1], [1], [0], [0], array("i", [5]), array("i")), [42])
    assert opened(8) == (5, 41)
    assert opened(9) == (-1, -1)
