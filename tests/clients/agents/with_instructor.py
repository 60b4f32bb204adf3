"""instructor where a call of a tool is the answer: its modes over chats, responses and messages.

A toy says nothing of use in a call that it is made to write, but what it says has to be of the type.
"""

from typing import Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel, Field
from two_tools import URL, report


# instructor leaves it to the model whether other properties are allowed, and a toy would go on with them.
class Pear(BaseModel, extra="forbid"):
    """A pear."""

    color: Literal["green", "yellow"]
    weight_g: int = Field(ge=50, le=400)


CHAT = [{"role": "user", "content": "Which pear?"}]


def answers() -> dict[str, str]:
    found = {}
    asked = {"model": "tiny", "messages": CHAT, "response_model": Pear, "max_retries": 0}
    one = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    other = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    clients = {
        "chat": instructor.from_openai(one, mode=instructor.Mode.TOOLS),
        "responses": instructor.from_openai(one, mode=instructor.Mode.RESPONSES_TOOLS),
        "messages": instructor.from_anthropic(other, mode=instructor.Mode.ANTHROPIC_TOOLS),
    }
    for name, client in clients.items():
        limit = {"max_output_tokens" if name == "responses" else "max_tokens": 200}
        found[name] = Pear.model_validate(client.create(**asked, **limit).model_dump()).color
        if name != "responses":
            *_, last = client.create_partial(**asked, **limit)
            found[f"{name} streamed"] = Pear.model_validate(last.model_dump()).color
    return found


report(answers)
