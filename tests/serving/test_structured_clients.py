"""Structured output as instructor and langchain-openai ask for it, from the bundled model.

In a virtual environment of their own: no test but this one needs them.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1500)]

CLIENTS = ("instructor>=1.17,<2", "langchain-openai>=1,<2")

SCRIPT = """
import json, sys
from typing import Literal
import instructor, openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

# instructor leaves it to the model whether other properties are allowed, and a toy would go on with them.
class Pear(BaseModel, extra="forbid"):
    color: Literal["green", "yellow"]
    weight_g: int = Field(ge=50, le=400)

class Basket(BaseModel, extra="forbid"):
    "Pears that somebody has."
    owner: str = Field(max_length=12)
    pears: list[Pear] = Field(max_length=4)

url, chat = sys.argv[1] + "/v1", [{"role": "user", "content": "Who has pears?"}]
found = {}
client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
basket = client.chat.completions.create(
    model="tiny", messages=chat, response_model=Basket, max_retries=0, max_tokens=400, seed=1
)
found["instructor"] = basket.model_dump_json()
model = ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, max_tokens=400, seed=1)
for strict in (True, False):
    asked = model.with_structured_output(Basket, method="json_schema", strict=strict)
    found[f"langchain {strict}"] = asked.invoke("Who has pears?").model_dump_json()
    parts = list(asked.stream("Who has pears?"))
    found[f"langchain {strict} streamed"] = parts[-1].model_dump_json()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: Any) -> str:
    """An interpreter that has both."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    interpreter = str(folder / "bin" / "python")
    install = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CLIENTS]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=1200, check=False)
    if installed.returncode:
        pytest.skip(f"they cannot be installed here: {installed.stderr[-300:]}")
    return interpreter


def test_instructor_and_langchain_get_what_they_ask_for(mesh_of: Any, python: str) -> None:
    url = mesh_of("--model", "tiny", "--mixed", "1").url
    done = subprocess.run([python, "-c", SCRIPT, url], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    for who, text in found.items():
        basket = json.loads(text)
        assert len(basket["owner"]) <= 12, who
        assert all(50 <= pear["weight_g"] <= 400 for pear in basket["pears"]), who
