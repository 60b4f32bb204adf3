"""smolagents' agent with tools, whole and streamed.

It demands calls until one is of `final_answer`, and shows results as turns of the user: neither is what the toy knows,
so that only the first step's calls, and that each step is one, are to be expected of it.
"""

from smolagents import ActionStep, OpenAIModel, ToolCallingAgent, tool
from two_tools import QUESTION, URL, report, time, weather

PROMPTS = {
    "system_prompt": "Be brief.",
    "planning": dict.fromkeys(("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""),
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": ""},
}


def answers() -> dict[str, str]:
    model = OpenAIModel("tiny", api_base=URL + "/v1", api_key="none", temperature=0, max_tokens=200)
    found = {}
    for name, streams in (("chat", False), ("chat streamed", True)):
        agent = ToolCallingAgent(
            [tool(weather), tool(time)],
            model,
            prompt_templates=PROMPTS,
            max_steps=1,
            stream_outputs=streams,
            verbosity_level=0,
        )
        agent.run(QUESTION)
        step = next(one for one in agent.memory.steps if isinstance(one, ActionStep))
        # It runs tools side by side, so that their results come in any order.
        found[name] = "\n".join(sorted(str(step.error or step.observations).splitlines()))
    return found


report(answers)
