"""What a name means: its owner's calls alone, and of them the prompts that go by it."""

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.admission.named_calls import NamedCalls, prompt_names
from nodes.gateway.requests.events import Opened
from nodes.gateway.requests.outputs import CallOutput, Generation
from nodes.protocol import Route
from nodes.request import RequestSpec, Sampling, StopRules


def generation(name: str, num_prompts: int, n: int = 1) -> Generation:
    num = num_prompts * n
    requests = [
        Opened(
            request_id=f"{name}-{number}", prompt_ids=[1], spec=RequestSpec(Sampling(), StopRules(1)),
            route=Route(decode="d", detokenizer="t"), arrived_at=0.0,
        )
        for number in range(num)
    ]  # fmt: skip
    return Generation(requests, CallOutput(num, whole=True), num_prompts)


def test_one_name_for_all_prompts_and_one_for_each() -> None:
    assert prompt_names("r", 1) == ["r"]
    assert prompt_names("r", 2) == ["r_0", "r_1"]
    assert prompt_names(["a", "b"], 2) == ["a", "b"]
    calls = NamedCalls()
    with calls.entered("alice", ["r", "gen-1"], 2) as call:
        assert call.opened(generation("gen-1", 2, n=2)) == []
        assert calls.abort("alice", "r_1") == ["gen-1-2", "gen-1-3"]
        assert calls.abort("alice", "r") == calls.abort("alice", "gen-1") == [f"gen-1-{number}" for number in range(4)]
        assert calls.abort("alice", "gen-1_0") == ["gen-1-0", "gen-1-1"]
        assert calls.abort("bob", "r") == calls.abort("", "r") == calls.abort("alice", "r_2") == []
    assert calls.abort("alice", "r") == []


def test_a_list_that_has_a_name_twice_means_both() -> None:
    calls = NamedCalls()
    with calls.entered("", [["a", "b", "a"]], 3) as call:
        call.opened(generation("q", 3))
        assert calls.abort("", "a") == ["q-0", "q-2"]


def test_what_is_aborted_before_it_is_opened_is_over_once_it_is() -> None:
    calls = NamedCalls()
    with calls.entered("", [["a", "b"]], 2) as call:
        assert calls.abort("", "b") == []
        assert call.opened(generation("q", 2)) == ["q-1"]
    with calls.entered("", ["r"], 2) as call:
        assert calls.abort_all("") == []
        assert call.opened(generation("q", 2)) == ["q-0", "q-1"]


OWNERS, NAMES = st.sampled_from(["", "alice", "bob"]), st.sampled_from(["r", "s", "r_0", "r_1"])
CALLS = st.lists(st.tuples(OWNERS, NAMES, st.integers(1, 3), st.integers(1, 2)), max_size=6)


@given(CALLS, OWNERS, NAMES)
def test_an_abort_reaches_its_owners_requests_of_that_name_and_no_other(
    given_calls: list[tuple[str, str, int, int]], owner: str, name: str
) -> None:
    calls = NamedCalls()
    due: set[str] = set()
    everybodys: set[str] = set()
    with ExitStack() as stack:
        for number, (its, called, num_prompts, n) in enumerate(given_calls):
            call = stack.enter_context(calls.entered(its, [called, f"gen-{number}"], num_prompts))
            made = generation(f"gen-{number}", num_prompts, n)
            call.opened(made)
            everybodys |= set(made.request_ids)
            for prompt, prompt_name in enumerate(prompt_names(called, num_prompts)):
                if its == owner and name in (called, prompt_name):
                    due |= set(made.request_ids[prompt * n : (prompt + 1) * n])
        found = calls.abort(owner, name)
        assert set(found) == due
        assert len(found) == len(due)
        its_own = {f"gen-{number}" for number, one in enumerate(given_calls) if one[0] == owner}
        assert {one.rpartition("-")[0] for one in calls.abort_all(owner)} == its_own
        assert set(calls.abort_all(None)) == everybodys
    assert len(calls) == 0
    assert calls.abort(owner, name) == calls.abort_all(None) == []
