"""The worker's table beside one made of dictionaries: what is refused changes nothing, what comes twice counts once."""

from hypothesis import given
from hypothesis import strategies as st

from nodes.asks import DrawnModel
from nodes.worker.steps.columns import Columns, Limits, read_columns
from nodes.worker.steps.sequence_table import SequenceTable
from tests.nodes.step_plans import Row, plan_of

LIMITS = Limits(num_pages=1000, page_size=4, vocab_size=50, context_length=64, max_batch_tokens=32)
ROW = st.builds(
    lambda slot, sequence, first, pages, opens: Row(
        sequence, pages=pages, slot=slot, first_page=0 if opens else first, opens=opens
    ),
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.integers(1, 999), max_size=3),
    st.booleans(),
)
STEP = st.lists(ROW, min_size=1, max_size=4, unique_by=lambda row: row.slot)


def columns_of(rows: list[Row]) -> tuple[list, Columns]:
    plan, buffers = plan_of(1, rows)
    columns = read_columns(plan, buffers, LIMITS)
    return plan.opens, columns


def known(table: SequenceTable, model: dict[int, tuple[int, list[int]]]) -> dict[int, tuple[int, list[int]]]:
    """What the table has in the slots of `model`."""
    found = {}
    for slot in model:
        one = table._slots[slot]
        found[slot] = (one.sequence, one.pages.tolist())
    return found


@given(st.lists(STEP, max_size=12))
def test_pages_are_where_a_dictionary_has_them(steps: list[list[Row]]) -> None:
    table = SequenceTable(DrawnModel(1 << 16))
    model: dict[int, tuple[int, list[int]]] = {}
    for rows in steps:
        after = {slot: (owner, list(pages)) for slot, (owner, pages) in model.items()}
        fits = True
        for row in rows:
            if row.opens:
                after[row.slot] = (row.sequence, [])
            owner, pages = after.get(row.slot, (-1, []))
            fits &= owner == row.sequence and row.first_page <= len(pages)
            pages[row.first_page : row.first_page + len(row.pages)] = row.pages
        opens, columns = columns_of(rows)
        for _ in range(2):
            assert isinstance(table.apply(opens, columns), list) == fits
            model = after if fits else model
            assert known(table, model) == model
