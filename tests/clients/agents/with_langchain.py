"""Agents of langchain over chats, responses and messages, whole and streamed."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from two_tools import QUESTION, URL, report, time, weather

ASKED = {"messages": [{"role": "user", "content": QUESTION}]}
SETTINGS = {"model": "tiny", "temperature": 0, "max_tokens": 200, "max_retries": 0, "api_key": "none"}


def answers() -> dict[str, str]:
    models = {
        "chat": ChatOpenAI(base_url=URL + "/v1", **SETTINGS),
        "responses": ChatOpenAI(base_url=URL + "/v1", use_responses_api=True, **SETTINGS),
        "messages": ChatAnthropic(base_url=URL, **SETTINGS),
    }
    found = {}
    for name, model in models.items():
        agent = create_agent(model, tools=[weather, time], system_prompt="Be brief.")
        found[name] = agent.invoke(ASKED)["messages"][-1].text
        parts = [part for part, _ in agent.stream(ASKED, stream_mode="messages") if isinstance(part, AIMessageChunk)]
        found[f"{name} streamed"] = "".join(part.text for part in parts)
    return found


report(answers)
