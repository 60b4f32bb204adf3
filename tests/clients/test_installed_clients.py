"""Clients that are no dependency of the tests: each is installed into a folder of its own, from its registry."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import node_with

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

IN_JAVASCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1/", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "what a client says" }];
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const whole = await client.chat.completions.create({ model: "bytes", messages });
let streamed = "";
const chunks = await client.chat.completions.create({ model: "bytes", messages, stream: true });
for await (const chunk of chunks) streamed += chunk.choices[0]?.delta?.content ?? "";
const text = await client.completions.create({ model: "bytes", prompt: "abc", max_tokens: 2 });
const failed = async (call) => {
  try { await call; } catch (error) { return [error.constructor.name, error.status, error.code, error.param]; }
};
const long = await failed(client.completions.create({ model: "bytes", prompt: "x".repeat(200) }));
const missing = await failed(client.chat.completions.create({ model: "gpt-99", messages }));
console.log(JSON.stringify({
  models, whole: whole.choices[0].message.content, streamed, text: text.choices[0].text, long, missing,
}));
"""


def output_of(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def test_openai_of_npm(served: Any, tmp_path: Path) -> None:
    node = node_with(tmp_path, ("openai@6.49.0",))
    (tmp_path / "ask.mjs").write_text(IN_JAVASCRIPT)
    told = json.loads(output_of(node, "ask.mjs", served.url, cwd=tmp_path))
    assert "bytes" in told["models"]
    assert told["whole"] == told["streamed"] == "what a client says"
    assert told["text"] == "ab"
    assert told["long"] == ["BadRequestError", 400, "context_length_exceeded", "prompt"]
    assert told["missing"] == ["NotFoundError", 404, "model_not_found", "model"]
