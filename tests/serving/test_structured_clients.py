"""Structured output as instructor, langchain-openai and npm's openai ask for it, from the bundled model.

Each in a folder of its own: no test but this one needs them.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import node_with, python_with

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1500)]

CLIENTS = ("instructor==1.17.0", "langchain-openai==1.7.4")

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
    return python_with(tmp_path_factory.mktemp("clients"), CLIENTS)


def test_instructor_and_langchain_get_what_they_ask_for(mesh_of: Any, python: str) -> None:
    url = mesh_of("--model", "tiny", "--mixed", "1").url
    done = subprocess.run([python, "-c", SCRIPT, url], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    for who, text in found.items():
        basket = json.loads(text)
        assert len(basket["owner"]) <= 12, who
        assert all(50 <= pear["weight_g"] <= 400 for pear in basket["pears"]), who


IN_JAVASCRIPT = """
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const Pear = z.object({ color: z.enum(["green", "yellow"]), weight_g: z.number().int().min(50).max(400) });
const Basket = z.object({
  owner: z.string().max(12), pears: z.array(Pear).max(4), rest: z.union([Pear, z.null()]),
});
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const asked = {
  model: "tiny", messages: [{ role: "user", content: "Who has pears?" }], max_tokens: 400, seed: 1, temperature: 1,
  response_format: zodResponseFormat(Basket, "basket"), logprobs: true, top_logprobs: 3,
};
const [whole] = (await client.chat.completions.parse(asked)).choices;
const stream = client.chat.completions.stream(asked);
let deltas = "";
stream.on("content", (delta) => (deltas += delta));
const [streamed] = (await stream.finalChatCompletion()).choices;
console.log(JSON.stringify({
  basket: whole.message.parsed, content: whole.message.content, logprobs: whole.logprobs.content, deltas,
  streamed: streamed.message.parsed, streamed_logprobs: streamed.logprobs.content,
}));
"""


def test_npms_openai_parses_with_zod_and_reads_logprobs(mesh_of: Any, tmp_path: Path) -> None:
    node = node_with(tmp_path, ("openai@6.49.0", "zod@4.6.7"))
    (tmp_path / "ask.mjs").write_text(IN_JAVASCRIPT)
    url = mesh_of("--model", "tiny", "--mixed", "1").url
    done = subprocess.run(
        [node, "ask.mjs", url], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    basket = found["basket"]
    assert basket == found["streamed"] == json.loads(found["content"])
    assert found["deltas"] == found["content"]
    assert all(50 <= pear["weight_g"] <= 400 for pear in basket["pears"])
    assert found["logprobs"] == found["streamed_logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in found["logprobs"]).decode() == found["content"]
    assert {len(one["top_logprobs"]) for one in found["logprobs"]} == {3}
