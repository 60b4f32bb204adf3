"""litellm over chats, responses and messages; `over`: what its caller speaks over what it speaks to the server.

Its streams of messages to a caller of messages import its proxy with all that this needs, and are left out.
"""

import json
import os
from typing import Any

# Otherwise it asks the internet for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from two_tools import PARAMETERS, QUESTION, URL, report, result

litellm.suppress_debug_info = True
FUNCTIONS = [
    {"name": name, "description": f"Tell the {name}.", "parameters": PARAMETERS} for name in ("weather", "time")
]
SERVER = {"api_base": URL + "/v1", "api_key": "none", "num_retries": 0, "timeout": 60, "temperature": 0}


def chat(model: str, base: str, *, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": one} for one in FUNCTIONS]
    server = SERVER | {"api_base": base, "max_tokens": 200}
    while True:
        answer: Any = litellm.completion(model=model, messages=messages, tools=tools, stream=stream, **server)
        answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
        said = answer.choices[0].message
        if not said.tool_calls:
            return said.content
        messages.append(said.model_dump())
        for call in said.tool_calls:
            content = result(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def responses(*, stream: bool) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", **one} for one in FUNCTIONS]
    while True:
        answer: Any = litellm.responses(model="openai/tiny", input=items, tools=tools, stream=stream, **SERVER)
        if stream:
            answer = next(event.response for event in answer if event.type == "response.completed")
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output[-1].content[0].text
        items += [item.model_dump() for item in answer.output]
        for call in calls:
            output = result(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


async def messages(model: str, base: str) -> str:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"name": one["name"], "input_schema": PARAMETERS} for one in FUNCTIONS]
    server = SERVER | {"api_base": base, "max_tokens": 200}
    while True:
        answer: Any = await litellm.anthropic.messages.acreate(model=model, messages=turns, tools=tools, **server)
        content = answer["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return content[-1]["text"]
        told = [(call["id"], result(call["name"], json.dumps(call["input"]))) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": of, "content": said} for of, said in told]
        turns += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


async def answers() -> dict[str, str]:
    found = {}
    for stream, how in ((False, ""), (True, " streamed")):
        found["chat" + how] = chat("openai/tiny", URL + "/v1", stream=stream)
        found["chat as vLLM" + how] = chat("hosted_vllm/tiny", URL + "/v1", stream=stream)
        found["chat over messages" + how] = chat("anthropic/tiny", URL, stream=stream)
        found["responses" + how] = responses(stream=stream)
    found["messages"] = await messages("anthropic/tiny", URL)
    found["messages over responses"] = await messages("openai/tiny", URL + "/v1")
    return found


report(answers)
