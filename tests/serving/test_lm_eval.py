"""lm-eval against a mesh, with tasks of its own kinds in local files: its scores are what transformers computes, and
the same through an engine as through HTTP.

In a virtual environment of its own: no test but this one needs it, nor hubs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from site import getsitepackages
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real_models.folders import folder_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "nodes" / "bundled" / "tiny"

pytestmark = [pytest.mark.process, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]

PACKAGES = ("lm-eval[api]>=0.4.9,<0.5", "transformers>=4.57")

CHOICES = [
    {"question": f"What is {a} + {b}? Answer:", "choices": [f" {a + b + off}" for off in (0, 1, 10)] + [" a pear tree"]}
    for a, b in ((12, 30), (7, 41), (55, 21), (80, 9), (33, 33))
]
TEXTS = ["The sky is blue, and the stones are small.", "Bob has 67 yellow apples. Clara has 14 yellow bags.", "é 🌧️!"]
CHATS = ["what is 40 + 19?", "What is the smaller of 50 and 18?", "Echo: blue stones", "what is 91 - 6?"]
PROMPT = "<|im_start|>user\n{{text}}<|im_end|>\n<|im_start|>assistant\n"

TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "local_choices": (
        CHOICES,
        {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": 0, "target_delimiter": "", "metric_list": [{"metric": "acc"}],
        },
    ),
    "local_texts": (
        [{"text": text} for text in TEXTS],
        {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ),
    "local_answers": (
        [{"text": text, "answer": "-"} for text in CHATS],
        {
            "output_type": "generate_until", "doc_to_text": PROMPT, "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["<|im_end|>", "5"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}  # fmt: skip
"""Documents, and how lm-eval is to ask about them."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment in which it is installed."""
    folder = tmp_path_factory.mktemp("lm-eval")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=1500, check=False)
    if installed.returncode:
        pytest.skip(f"lm-eval cannot be installed here: {installed.stderr[-300:]}")
    # For an engine, which needs this package and all that it does: after the harness's own packages.
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "engine.pth").write_text("\n".join([str(ROOT), *getsitepackages()]))
    return str(folder / "bin" / "python")


def through_http(url: str, model: Path) -> list[str]:
    asked = f"model=served,base_url={url}/v1/completions,tokenizer={model},num_concurrent=2,max_retries=1"
    return ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", asked]


def through_engine(model: Path) -> list[str]:
    asked = f"model={model},dtype=float32,context_length=2048,mixed=1"
    return [str(ROOT / "examples" / "lm_eval_engine.py"), "run", "--model", "kvmesh", "--model_args", asked]


def samples(harness: str, through: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What was asked and answered, by task; each document in its order."""
    folder.mkdir(exist_ok=True)
    for name, (documents, task) in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
        files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    command = [
        harness, *through, "--tasks", ",".join(TASKS),
        "--batch_size", "2", "--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out"),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    ran = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=900, check=False, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for name in TASKS:
        [path] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda one: one["doc_id"])
        assert len(found[name]) == len(TASKS[name][0])
    return found


class Reference:
    """transformers, asked for the same."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """The logprob of what follows, and whether it is what is most likely throughout."""
        whole = self._tokenizer(context + continuation)["input_ids"]
        begin = len(self._tokenizer(context)["input_ids"]) if context else 0
        # Without a context a text begins after the prefix token that lm-eval puts there.
        first = self._tokenizer.bos_token_id
        ids = whole if context else [self._tokenizer.eos_token_id if first is None else first, *whole]
        begin = begin or 1
        with torch.inference_mode():
            rows = torch.log_softmax(self._model(torch.tensor([ids])).logits[0], -1)
        logs = [float(row[own]) for row, own in zip(rows[begin - 1 :], ids[begin:], strict=False)]
        is_greedy = rows[begin - 1 : -1].argmax(-1).tolist() == ids[begin:]
        return sum(logs), is_greedy

    def answer(self, prompt: str, until: list[str], most: int) -> str:
        ids = self._tokenizer(prompt, return_tensors="pt")
        rows = self._model.generate(**ids, max_new_tokens=most, do_sample=False)
        text = self._tokenizer.decode(rows[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return text[: min([at for one in until if (at := text.find(one)) >= 0], default=None)]


def requests_of(one: dict[str, Any]) -> Iterator[tuple[list[Any], Any]]:
    """Arguments of each request of a document, with the answer."""
    arguments = [list(given.values()) for given in one["arguments"].values()]
    for given, [answer] in zip(arguments, one["resps"], strict=True):
        yield given, answer


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2-135m-instruct", marks=pytest.mark.real_models)])
def test_its_scores_and_answers_are_those_of_transformers(
    mesh_of: Any, harness: str, tmp_path: Path, name: str
) -> None:
    model = TINY if name == "tiny" else folder_of(name)
    mesh = mesh_of("--model", str(model), "--dtype", "float32", "--context-length", "2048", "--served-name", "served")
    found = samples(harness, through_http(mesh.url, model), tmp_path)
    reference = Reference(model)
    greedy: list[bool] = []
    for one in found["local_choices"]:
        for (context, continuation), (score, is_greedy) in requests_of(one):
            expected, expected_greedy = reference.score(context, continuation)
            assert float(score) == pytest.approx(expected, abs=1e-3)
            assert (str(is_greedy) == "True") == expected_greedy
            greedy.append(expected_greedy)
    assert len(greedy) == 4 * len(CHOICES)
    for one in found["local_texts"]:
        [([text], score)] = requests_of(one)
        assert float(score) == pytest.approx(reference.score("", text)[0], abs=1e-3)
    for one in found["local_answers"]:
        [((prompt, options), text)] = requests_of(one)
        assert text == reference.answer(prompt, options["until"], 24)


def test_through_an_engine_it_finds_what_it_finds_through_http(mesh_of: Any, harness: str, tmp_path: Path) -> None:
    options = ("--model", str(TINY), "--dtype", "float32", "--context-length", "2048", "--served-name", "served")
    by_http = samples(harness, through_http(mesh_of(*options).url, TINY), tmp_path / "http")
    by_engine = samples(harness, through_engine(TINY), tmp_path / "engine")
    for name in TASKS:
        for one, other in zip(by_http[name], by_engine[name], strict=True):
            assert one["arguments"] == other["arguments"]
            # To the bit: the same prompts, and logits that no batch changes.
            assert one["resps"] == other["resps"]
