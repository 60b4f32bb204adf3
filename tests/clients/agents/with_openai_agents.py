"""OpenAI's agents over chats and over responses, whole and streamed."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from two_tools import QUESTION, URL, report, time, weather

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


async def answers() -> dict[str, str]:
    found = {}
    tools = [function_tool(weather), function_tool(time)]
    async with AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0) as client:
        for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
            model = kind(model="tiny", openai_client=client)
            agent = Agent(name="guide", instructions="Be brief.", model=model, tools=tools, model_settings=SETTINGS)
            found[name] = (await Runner.run(agent, QUESTION)).final_output
            run, deltas = Runner.run_streamed(agent, QUESTION), ""
            async for event in run.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    deltas += event.data.delta
            found[f"{name} streamed"], found[f"{name} deltas"] = run.final_output, deltas
    return found


report(answers)
