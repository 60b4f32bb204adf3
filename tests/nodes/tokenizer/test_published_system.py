"""Chat templates as published: what is said as the system in the middle of a chat with tools shows in its place.

`TEST_TEMPLATES` names a folder of `NAME.jinja`, such as vendor/llama.cpp/models/templates of llama-cpp-python's source.
"""

import json
import os
from pathlib import Path

import pytest

from nodes.tokenizer.errors import TemplateError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate

pytestmark = pytest.mark.real_models

# By name, what the template does by itself.
PUBLISHED = {
    "Qwen-Qwen3-0.6B": "shows",
    "meta-llama-Llama-3.1-8B-Instruct": "shows",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "shows",
    "deepseek-ai-DeepSeek-V3.1": "gathers",
    "openai-gpt-oss-120b": "refuses",
    "MiniMax-M2": "refuses",
}
TOOL = {"name": "get", "description": "Gets it.", "parameters": {"type": "object", "properties": {}}}
ORDER = ("RESULT1", "LATE1", "RESULT2", "LATE2")


def loop():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for turn in "12":
        call_id = f"abcdefgh{turn}"
        function = {"name": "get", "arguments": "{}"}
        calls = [{"id": call_id, "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call_id, "name": "get", "content": f"RESULT{turn}"},
            {"role": "system", "content": f"LATE{turn}"},
        ]
    return json.dumps(messages).encode()


@pytest.mark.parametrize("name", PUBLISHED)
def test_system_messages_between_results_show_in_their_places(name):
    folder = os.environ.get("TEST_TEMPLATES")
    if not folder or not (file := Path(folder, f"{name}.jinja")).exists():
        pytest.skip("TEST_TEMPLATES names no folder with this template")
    template = ChatTemplate(file.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, 100_000)
    tools = json.dumps([{"type": "function", "function": TOOL}]).encode()

    def places(**fields):
        text = template.render(ChatRequest(chat=loop(), tools=tools, **fields))
        return [text.index(one) for one in ORDER]

    assert places(late_system_as_user=True) == sorted(places(late_system_as_user=True))
    if PUBLISHED[name] == "refuses":
        with pytest.raises(TemplateError):
            places()
    else:
        assert (places() == sorted(places())) == (PUBLISHED[name] == "shows")
