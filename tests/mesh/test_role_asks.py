"""Any actor of a role may answer; who cannot is passed over."""

import asyncio
from types import SimpleNamespace

import pytest

from mesh.calls.role_asks import RoleAsks
from mesh.errors import CallError, RemoteError


class Asked:
    """A context whose actors answer as `answers` says: an error is raised, anything else returned."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []
        self.members = self

    def by_role(self, role):
        assert role == "r"
        return [SimpleNamespace(actor_id=actor_id) for actor_id in self.answers]

    def now(self):
        return asyncio.get_running_loop().time()

    async def ask(self, actor_id, message, *, timeout_s):
        self.asked.append(actor_id)
        answer = self.answers[actor_id]
        if isinstance(answer, CallError):
            raise answer
        return SimpleNamespace(message=answer)


def refusal(code, *, retryable=False):
    return RemoteError(code, "as told", retryable)


def outcome(answers, patience_s=0.0):
    async def main():
        context = Asked(answers)
        try:
            answer = await RoleAsks(context, "r").ask("?", timeout_s=1.0, patience_s=patience_s)
        except CallError as error:
            answer = error.code
        return answer, sorted(context.asked)

    return asyncio.run(main())


@pytest.mark.parametrize("first", [refusal("not_served"), refusal("overloaded", retryable=True)])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_another_of_the_role_is_asked(first, order):
    answers = {"a": first, "b": "yes"}
    assert outcome({name: answers[name] for name in order})[0] == "yes"


def test_a_refusal_for_good_is_the_answer():
    assert outcome({"a": refusal("bad_prompt"), "b": refusal("bad_prompt")})[0] == "bad_prompt"


def test_not_served_by_all_is_an_error_at_once():
    assert outcome({"a": refusal("not_served"), "b": refusal("not_served")}, 60.0) == ("not_served", ["a", "b"])


def test_where_some_do_not_serve_it_and_others_cannot_now_the_others_are_waited_for():
    answers = {"a": refusal("not_served"), "b": refusal("overloaded", retryable=True)}
    code, asked = outcome(answers, 0.5)
    assert code == "overloaded"
    assert len(asked) > 2


def test_nobody_there():
    assert outcome({}) == ("no_r", [])
