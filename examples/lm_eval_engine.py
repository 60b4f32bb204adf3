"""lm-eval with an `Engine`: no server, no ports, and every request of a task given at once.

    python examples/lm_eval_engine.py run --model kvmesh --model_args model=DIR,dtype=bfloat16 --tasks arc_easy

In an environment that has this package, lm-eval (0.4.9 or later) and transformers, whose tokenizer of the model makes
the ids. `model_args` are arguments of `Engine`, whose `device` is `run_on` here; `attach=NAME,tokenizer=DIR` asks a
mesh that runs. Scores and answers are those of `--model local-completions` against a server of the same mesh.
"""

from typing import Any

from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, setup_logging
from transformers import AutoTokenizer

from nodes import Engine

MAX_ANSWER_TOKENS = 256
"""lm-eval's own, where a task does not say how long answers may be."""


@register_model("kvmesh")
class EngineLM(TemplateLM):
    """A model that an engine serves."""

    def __init__(
        self,
        model: str = "tiny",
        tokenizer: str | None = None,
        attach: str | None = None,
        run_on: str = "cpu",
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        # What lm-eval always gives, wanted or not. The engine makes its batches itself.
        del batch_size, max_batch_size, device
        self.engine = Engine.attach(attach) if attach else Engine(model, device=run_on, **settings)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or self.engine.config.model)
        # One token is always drawn.
        self.max_length = self.engine.config.context_length - 1

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        prompts, starts = [], []
        for _, context, continuation in requests:
            # What is too long loses its beginning.
            prompts.append((context + continuation)[-self.max_length :])
            starts.append(max(1, len(prompts[-1]) - len(continuation)))
        answers = self.engine.generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": 0, "temperature": 0},
            return_logprob=True,
            logprob_start_len=starts,
            top_logprobs_num=1,
        )
        scores = []
        for (key, _, _), answer in zip(requests, answers, strict=True):
            meta = answer["meta_info"]
            logprobs = [logprob for logprob, *_ in meta["input_token_logprobs"]]
            best = [likely[0][0] for likely in meta["input_top_logprobs"]]
            scores.append((sum(logprobs), logprobs == best))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, scores[-1])
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        of_text: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                of_text.append(number)
        sums = [0.0] * len(requests)
        for number, (score, _) in zip(of_text, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += score
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, sampling = [], []
        for context, options in (request.args for request in requests):
            given = {name: value for name, value in options.items() if name not in ("until", "do_sample")}
            most = given.pop("max_gen_toks", MAX_ANSWER_TOKENS)
            stop = handle_stop_sequences(options.get("until"), self.tokenizer.eos_token)
            sampling.append({"max_new_tokens": most, "temperature": 0, "stop": stop} | given)
            prompts.append(self.tok_encode(context)[-(self.max_length - most) :])
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [answer["text"] for answer in answers]


if __name__ == "__main__":
    setup_logging()
    harness = HarnessCLI()
    harness.execute(harness.parse_args())
