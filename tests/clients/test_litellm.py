"""litellm against a gateway with a ring of bytes behind it: it tells a prompt that is too long from other errors.

Routers and agents that are built on it shorten or reroute on that error. It looks at the message's text alone. In a
virtual environment of its own, because it pins what this project pins otherwise.
"""

import json
import subprocess
from typing import Any

import pytest

from tests.clients.environments import python_with

pytestmark = [pytest.mark.clients, pytest.mark.slow]

LITELLM = "litellm==1.110.2"

SCRIPT = """
import json, sys
import litellm

litellm.suppress_debug_info = True
server = {"api_base": sys.argv[1] + "/v1", "api_key": "none", "num_retries": 0, "timeout": 60}
chat = [{"role": "user", "content": "x" * 300}]
calls = {
    "chat": lambda: litellm.completion(model="openai/bytes", messages=chat, **server),
    "stream": lambda: list(litellm.completion(model="openai/bytes", messages=chat, stream=True, **server)),
    "as vLLM": lambda: litellm.completion(model="hosted_vllm/bytes", messages=chat, **server),
    "completion": lambda: litellm.text_completion(
        model="text-completion-openai/bytes", prompt="x", max_tokens=300, **server
    ),
    "other": lambda: litellm.completion(model="openai/bytes", messages=chat, temperature=-1, **server),
}
found = {}
for name in sys.argv[2:]:
    try:
        calls[name]()
        found[name] = ""
    except Exception as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: Any) -> str:
    """An interpreter that has litellm."""
    return python_with(tmp_path_factory.mktemp("litellm"), (LITELLM,))


@pytest.mark.timeout(1500)
def test_litellm_tells_a_context_that_is_exceeded_from_other_errors(served: Any, python: str) -> None:
    def errors(*names: str) -> dict[str, str]:
        command = [python, "-c", SCRIPT, served.url, *names]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    found = errors("chat", "stream", "as vLLM", "completion", "other")
    assert found.pop("other") == "BadRequestError"
    assert set(found.values()) == {"ContextWindowExceededError"}, found
