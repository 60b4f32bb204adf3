"""An `Engine`: a mesh without HTTP in a program of its own. `python examples/engine.py [MODEL]`, by default `tiny`.

One prompt, a batch, a stream, a chat, and coroutines; the mesh ends with the program, however that ends.
"""

import asyncio
import sys

from nodes import Engine

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def many(engine: Engine) -> None:
    asked = (engine.async_generate(QUESTION.format(f"What is {n} + 1?"), {"temperature": 0}) for n in range(10, 13))
    print("coroutines:", *(answer["text"] for answer in await asyncio.gather(*asked)))


def main() -> None:
    with Engine(sys.argv[1] if len(sys.argv) > 1 else "tiny", mixed=1) as engine:
        print("one:", engine.generate(QUESTION.format("What is 37 + 45?"), {"temperature": 0})["text"])
        prompts = [QUESTION.format(f"Echo: blue {name}") for name in ("stones", "apples", "bags")]
        answers = engine.generate(prompts, {"temperature": 0}, return_logprob=True)
        for answer in answers:
            logprob = sum(one[0] for one in answer["meta_info"]["output_token_logprobs"])
            print(f"batch: {answer['text']} ({logprob:.2f})")
        for event in engine.generate(prompts[0], {"temperature": 0}, stream=True):
            print("stream:", event["text"])
        said = engine.chat([{"role": "user", "content": "What is 50 + 18?"}], temperature=0)
        print("chat:", said["choices"][0]["message"]["content"])
        asyncio.run(many(engine))


if __name__ == "__main__":
    main()
