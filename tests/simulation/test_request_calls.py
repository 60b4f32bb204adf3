"""What a request may cost: nothing slows a mesh as surely as many features of which each costs a hundredth."""

from tests.simulation.request_calls import count_calls

CEILINGS = {
    "detokenizer": 63, "gateway": 292, "kv-agent": 249, "scheduler-decode": 620, "scheduler-prefill": 376,
    "tokenizer": 106, "worker-decode": 60, "worker-prefill": 80,
}  # fmt: skip
"""Python calls for a request of two tokens, a tenth above those of 2026-11-28 with Python 3.11; later Pythons make
fewer. Who needs more raises it, in a commit that says for what; who needs less lowers it.
"""


def test_a_request_costs_no_more_calls_than_it_did() -> None:
    taken = count_calls(2).by_role()
    assert taken.keys() >= CEILINGS.keys()
    dearer = {role: (taken[role], most) for role, most in CEILINGS.items() if taken[role] > most}
    assert not dearer, "Python calls for a request, and how many it may take: see `tests.simulation.request_calls`"
    cheaper = {role: taken[role] for role, most in CEILINGS.items() if taken[role] < most / 1.6}
    assert not cheaper, "lower the ceiling, or look whether something is not counted any more"
