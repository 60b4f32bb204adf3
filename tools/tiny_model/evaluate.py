"""Scores a directory of `tiny` on held-out questions, and writes the samples that tests rely on.

    python -m tools.tiny_model.evaluate nodes/bundled/tiny
    python -m tools.tiny_model.evaluate nodes/bundled/tiny --agent-loop 500
    python -m tools.tiny_model.evaluate nodes/bundled/tiny --write-samples

Greedy decoding with ``transformers`` in float32, exact match of the whole answer.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.tiny_model.agent_loop import held_out_loops, run_loops
from tools.tiny_model.conversation import Example
from tools.tiny_model.grammar import FAMILY_NAMES, PLAIN_FAMILY_NAMES, held_out_examples
from tools.tiny_model.tokenizer import MAX_LENGTH

BATCH_SIZE: Final = 64
SAMPLES_SEED: Final = 7
SAMPLES_PER_FAMILY: Final = 3
CANDIDATES_PER_FAMILY: Final = 80
LEAST_MARGIN: Final = 0.1
# What the model card promises. The others are trained too, and scored and shown, but fall short.
PROMISED: Final = (
    "add",
    "subtract",
    "multiply",
    "compare",
    "story",
    "repeat",
    "repeat_unicode",
    "reverse",
    "pick",
    "count_words",
    "recall",
    "sequence",
    "small_talk",
    "unknown",
    "json",
)
PROMISED_WITH_TOOLS: Final = ("call", "call_two", "call_missing", "call_result", "call_two_results")


@dataclass(frozen=True, slots=True)
class Generated:
    """A greedy answer and the least gap, over its tokens, between the best and the next logit."""

    text: str
    num_tokens: int
    margin: float


class Model:
    """A loaded directory that answers conversations greedily."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def encode(self, example: Example) -> list[int]:
        """Token ids of the prompt, by the directory's chat template."""
        text: str = self._tokenizer.apply_chat_template(
            [message.openai() for message in example.messages],
            tools=[tool.openai() for tool in example.tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(self, examples: Sequence[Example]) -> list[Generated]:
        """Greedy answers, in order; prompts of like length share a batch."""
        prompts = [self.encode(example) for example in examples]
        lengths = [len(self._tokenizer(example.answer)["input_ids"]) for example in examples]
        order = sorted(range(len(prompts)), key=lambda i: (lengths[i] // 50, len(prompts[i])))
        answers: dict[int, Generated] = {}
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            limit = 8 + 5 * max(lengths[i] for i in chosen) // 4
            answers.update(zip(chosen, self._generate([prompts[i] for i in chosen], limit), strict=True))
        return [answers[i] for i in range(len(prompts))]

    def _generate(self, prompts: list[list[int]], limit: int) -> list[Generated]:
        width = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id
        output = self._model.generate(
            input_ids=torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            max_new_tokens=min(limit, MAX_LENGTH - width),
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(output.logits).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).T
        generated: list[Generated] = []
        for row, gap in zip(output.sequences[:, width:].tolist(), gaps, strict=True):
            end = next((i for i, token in enumerate(row) if token in self._model.generation_config.eos_token_id), None)
            num_tokens = len(row) if end is None else end + 1
            text: str = self._tokenizer.decode(row[:end], skip_special_tokens=True)
            generated.append(Generated(text, num_tokens, float(gap[:num_tokens].min())))
        return generated


def score(
    model: Model, per_family: int, seed: int, families: Sequence[str] = FAMILY_NAMES
) -> dict[str, tuple[int, int]]:
    """For each family, the number of right held-out answers, and the number of all."""
    examples = [e for family in families for e in held_out_examples(seed, family, _count(family, per_family))]
    scores: dict[str, tuple[int, int]] = {}
    for example, generated in zip(examples, model.answer(examples), strict=True):
        right, total = scores.get(example.family, (0, 0))
        scores[example.family] = (right + (generated.text == example.answer), total + 1)
    return scores


def _count(family: str, per_family: int) -> int:
    """A quarter as many in families with long answers and prompts, which take most of the time."""
    return -(-per_family // 4) if family.endswith("_long") else per_family


def total(scores: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Right answers, and all, over the families given."""
    return sum(right for right, _ in scores.values()), sum(count for _, count in scores.values())


def table(scores: dict[str, tuple[int, int]]) -> str:
    """The scores as a Markdown table: what is promised, what is not, and all."""
    others = [family for family in scores if family not in (*PROMISED, *PROMISED_WITH_TOOLS)]
    lines = ["| family | exact match | right of |", "|---|---:|---:|"]
    for title, families in (
        ("all promised", PROMISED),
        ("all promised with tools", PROMISED_WITH_TOOLS),
        ("all not promised", others),
    ):
        part = {family: scores[family] for family in families if family in scores}
        lines += [_line(family, row) for family, row in part.items()]
        if part:
            lines.append(_line(f"**{title}**", total(part)))
    return "\n".join([*lines, _line("**all families**", total(scores))])


def _line(name: str, row: tuple[int, int]) -> str:
    right, count = row
    return f"| {name} | {right / count:.1%} | {right} of {count} |"


def collect_samples(model: Model) -> list[dict[str, object]]:
    """Held-out conversations without tools that the model answers right and by a clear margin.

    The margin keeps a test from depending on the last bit of a float: no token of these answers leads
    the next best by less than a tenth of a logit, hundreds of times what float32 kernels differ by.
    Families that are not promised are included if enough candidates turned out right: such a sample
    says what these weights answer to that conversation, not how good the family is.
    """
    samples: list[dict[str, object]] = []
    for family in PLAIN_FAMILY_NAMES:
        few = 4 * SAMPLES_PER_FAMILY
        examples = held_out_examples(SAMPLES_SEED, family, few if family in PROMISED else CANDIDATES_PER_FAMILY)
        good = (
            (example, generated)
            for example, generated in zip(examples, model.answer(examples), strict=True)
            if generated.text == example.answer and generated.margin >= LEAST_MARGIN
        )
        for example, generated in islice(good, SAMPLES_PER_FAMILY):
            samples.append(
                {
                    "family": family,
                    "messages": [message.openai() for message in example.messages],
                    "answer": generated.text,
                    "prompt_tokens": len(model.encode(example)),
                    "completion_tokens": generated.num_tokens,
                }
            )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--per-family", type=int, default=200, help="held-out examples per family (default 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--agent-loop", type=int, metavar="N", help="score N questions of an agent's loop instead")
    parser.add_argument("--write-samples", action="store_true", help="write samples.json into the directory instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Model(arguments.directory)
    if arguments.write_samples:
        samples = collect_samples(model)
        text = json.dumps(samples, ensure_ascii=False, indent=1)
        (arguments.directory / "samples.json").write_text(text + "\n", encoding="utf-8")
        print(f"{len(samples)} samples")
    elif arguments.agent_loop:
        loops = held_out_loops(arguments.seed, arguments.agent_loop)
        loop_score = run_loops(lambda examples: [one.text for one in model.answer(examples)], loops)
        print(f"of {loop_score.questions}: {loop_score.right_calls} right calls, {loop_score.right_answers} answers")
    else:
        print(table(score(model, arguments.per_family, arguments.seed)))


if __name__ == "__main__":
    main()
