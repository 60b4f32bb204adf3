"""pydantic-ai over three surfaces, whole and streamed."""

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from two_tools import QUESTION, URL, report, time, weather

SETTINGS = {"temperature": 0, "max_tokens": 200}


async def answers() -> dict[str, str]:
    openai = OpenAIProvider(base_url=URL + "/v1", api_key="none")
    models = {
        "chat": OpenAIChatModel("tiny", provider=openai),
        "responses": OpenAIResponsesModel("tiny", provider=openai),
        "messages": AnthropicModel("tiny", provider=AnthropicProvider(base_url=URL, api_key="none")),
    }
    found = {}
    for name, model in models.items():
        agent = Agent(model, model_settings=SETTINGS, tools=[weather, time], retries=0)
        found[name] = (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as streamed:
            found[f"{name} streamed"] = "".join([part async for part in streamed.stream_text(delta=True)])
    return found


report(answers)
