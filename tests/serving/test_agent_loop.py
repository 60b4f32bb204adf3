"""An agent's loop on the bundled model through the `openai` client: question, calls, results, answer."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serving.conftest import APART
from tools.tiny_model.agent_loop import held_out_loops, run_loops, sent_messages
from tools.tiny_model.conversation import Call, Example, answer_of

pytestmark = [pytest.mark.process, pytest.mark.clients]

AT_ONCE = 8
"""As many as a batch of the worker: more only wait."""


@pytest.fixture
def client(mesh_of: Any) -> Iterator[openai.OpenAI]:
    url = mesh_of(*APART).url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, example: Example) -> str:
    """What the model said, its calls written as it writes them."""
    tools = [tool.openai() for tool in example.tools]
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    asked: Any = {"model": "tiny", "messages": sent_messages(example), "temperature": 0, "max_tokens": 200, **fields}
    choice = client.chat.completions.create(**asked).choices[0]
    calls: Any = choice.message.tool_calls or ()
    assert (choice.finish_reason == "tool_calls") == bool(calls) or choice.finish_reason == "length"
    said = tuple(Call(one.function.name, one.function.arguments) for one in calls)
    return (choice.message.content or "") + answer_of(said)


# Nine hundred answers: 103 s on two cores that had other work too.
ALL = pytest.param(500, 475, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


@pytest.mark.parametrize(("questions", "least"), [(20, 18), ALL])
def test_the_calls_are_right(client: openai.OpenAI, questions: int, least: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:

        def answers(asked: Sequence[Example]) -> list[str]:
            return list(threads.map(lambda one: ask(client, one), asked))

        score = run_loops(answers, held_out_loops(1, questions))
    assert score.questions == questions
    assert score.right_calls >= least
    assert score.right_answers >= 0.9 * questions
