"""What int8 weights change: logits, most likely tokens and answers, compared with the same model in float32.

`--quantize int8` uses one scale per row; scales for fewer numbers are compared with that. Everything is computed by
torch, whose kernels are the oracle. The texts are the samples of `tiny`, and for other models random tokens.

    python -m benchmarks.quantization [tiny random:qwen2.5-0.5b]
"""

import json
import math
import sys
from array import array
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nodes.model_spec import ModelSpec, resolve_model
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.batch import host_batch, pack, unpack
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.opening import open_weights
from nodes.worker.weights.quantization import quantized_names, rounded_to_int8

SCALED: Final = {"none": 0, "row": -1, "128": 128, "64": 64}
"""How many numbers share a scale; -1: all of a row, 0: nothing is rounded."""
_NUM_TOKENS: Final = 96


class Text(NamedTuple):
    """Token ids; from `begin` on they are the answer."""

    ids: list[int]
    begin: int


class Rounded:
    """A `WeightSource` whose matrices are rounded, with a scale for every `scaled` numbers of a row."""

    def __init__(self, source: WeightSource, spec: ModelSpec, scaled: int) -> None:
        self._source, self._scaled = source, scaled
        self._names = quantized_names(spec.quantized("int8")) if scaled else frozenset()

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name; if it is one that is rounded, as float32 after rounding."""
        found = self._source.tensor(name)
        if name not in self._names:
            return found
        width = found.shape[1] if self._scaled < 0 else self._scaled
        padded = torch.nn.functional.pad(found, (0, -found.shape[1] % width))
        return rounded_to_int8(padded.view(-1, width)).view(padded.shape)[:, : found.shape[1]].contiguous()


def logits(spec: ModelSpec, dtype: str, scaled: int, texts: list[Text]) -> list[Tensor]:
    """Logits of all positions of each text, float32."""
    layout = spec.kv_layout(dtype)
    num_pages = max(layout.num_pages_for(len(text.ids)) for text in texts)
    pool = PoolView(bytearray((1 + num_pages) * layout.page_bytes), layout)
    attention = TorchAttention(pool, spec.num_heads, kinds_of(spec))
    weights: Any = Rounded(open_weights(spec, TORCH_DTYPES[dtype]), spec, scaled)
    found: list[Tensor] = []
    with torch.inference_mode():
        network = DeviceNetwork(spec, weights, TorchKernels(), torch.device("cpu"))
        for ids, _ in texts:
            rows = Rows([OpenSequence(Open(0, 0, len(ids), Sampling()))], [0], [len(ids)], [0], [0])
            step = RunnableStep(1, rows, array("i", ids), array("i", range(1, 1 + num_pages)))
            batch = host_batch(step, layout.page_size)
            arrays = unpack(torch.from_numpy(pack(batch)), batch.num_rows, 1)
            attention.plan(batch, arrays)
            found.append(network.forward(arrays.token_ids, arrays.positions, attention, None).float())
    return found


def texts_of(spec: ModelSpec) -> list[Text]:
    """Questions with their answers, or one text of random tokens."""
    if spec.name != "tiny":
        return [Text(np.random.default_rng(0).integers(0, spec.vocab_size, _NUM_TOKENS).tolist(), 1)]
    tokenizer = load_tokenizer(spec)
    texts: list[Text] = []
    for sample in json.loads((Path(spec.path) / "samples.json").read_text()):
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in sample["messages"]]
        asked, answer = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in ("".join(turns) + "<|im_start|>assistant\n", sample["answer"] + "<|im_end|>")
        )
        texts.append(Text(asked + answer, len(asked)))
    return texts


def report(name: str, texts: list[Text], found: list[Tensor], right: list[Tensor]) -> None:
    """One line: errors over all positions, in units of the logits' standard deviation; the rest over answers."""
    pairs = list(zip(found, right, strict=True))
    worst = max(float((a - b).abs().max() / b.std()) for a, b in pairs)
    mean = math.sqrt(sum(float(((a - b) / b.std()).square().mean()) for a, b in pairs) / len(pairs))
    agreeing = sum(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in pairs) / sum(len(text.ids) for text in texts)
    loss, exact, count = 0.0, 0, 0
    for text, of_text in zip(texts, found, strict=True):
        answer, given = torch.tensor(text.ids[text.begin :]), of_text[text.begin - 1 : -1]
        loss += float(torch.nn.functional.cross_entropy(given, answer, reduction="sum"))
        exact += bool((given.argmax(1) == answer).all())
        count += len(answer)
    print(
        f"  {name:18} logits: max {worst:.3f}, RMS {mean:.4f}  most likely token the same {agreeing:.2%}"
        f"  answers: perplexity {math.exp(loss / count):.4f}, exact {exact} of {len(texts)}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    for name in sys.argv[1:] or ["tiny"]:
        spec = resolve_model(name)
        texts = texts_of(spec)
        right = logits(spec, "float32", 0, texts)
        print(name)
        for dtype in ("float32", "bfloat16"):
            for label, scaled in SCALED.items():
                report(f"{dtype}, {label}", texts, logits(spec, dtype, scaled, texts), right)


if __name__ == "__main__":
    main()
