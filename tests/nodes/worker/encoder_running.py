"""The last hidden states of encoders, whichever runner computes them, and checkpoints as transformers saves them."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.protocol.steps import Open
from nodes.worker.ops.native.runner import NativeRunner, columns_of
from nodes.worker.ops.torch.batch import batch_types, first_rows, host_batch, pack, unpack
from nodes.worker.ops.torch.runner import TorchRunner
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep
from tests.nodes.worker.torch_running import GREEDY

VOCABULARY = 300


def encoded(
    runner: NativeRunner | TorchRunner, *inputs: Sequence[int], seconds: Sequence[int] = (), first_page: int = 1
) -> list[torch.Tensor]:
    """The states `[len(input), hidden]` of inputs that are one step, with types 1 from `seconds[i]` on."""
    rows, tokens, pages = [], array("i"), array("i")
    for index, ids in enumerate(inputs):
        second = seconds[index] if seconds else 0
        one = OpenSequence(Open(index, index, len(ids), GREEDY, second_from=second))
        rows.append(RunnableRow(index, one, 0, len(ids), len(tokens), len(pages), 0))
        tokens.extend(ids)
        num_pages = -(-len(ids) // 16)
        pages.extend(range(first_page, first_page + num_pages))
        first_page += num_pages
    step = RunnableStep(1, Rows.of(rows), tokens, pages)
    states = _native_states(runner, step) if isinstance(runner, NativeRunner) else _torch_states(runner, step)
    return list(states.split([len(ids) for ids in inputs]))


def _native_states(runner: NativeRunner, step: RunnableStep) -> torch.Tensor:
    pooled = runner._steps.room_for(array("i", range(step.num_tokens)))
    runner._steps.run(columns_of(step, []), pooled=pooled)
    return torch.from_numpy(pooled.states)


def _torch_states(runner: TorchRunner, step: RunnableStep) -> torch.Tensor:
    network, attention = runner._network, runner._attention
    with torch.inference_mode():
        batch = host_batch(step, 16)
        arrays = unpack(torch.from_numpy(pack(batch)), batch.num_rows, 0)
        attention.plan(batch, arrays)
        # Batches have single rows first.
        firsts = zip(first_rows(step), step.rows.counts, strict=True)
        places = torch.from_numpy(np.concatenate([np.arange(first, first + count) for first, count in firsts]))
        types = torch.from_numpy(batch_types(step, network.spec))
        arguments = (arrays.token_ids, arrays.positions, attention, arrays.sampled)
        network.forward(*arguments, pooled=places, types=types)
        assert network.states is not None
        return network.states


def save_encoder(directory: Path, kind: str = "bert", make: Any = AutoModel, **fields: Any) -> torch.nn.Module:
    """A random encoder; `make` is the class that it is saved as."""
    torch.manual_seed(7)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
        "num_hidden_layers": 2, "max_position_embeddings": 200, "initializer_range": 0.15,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **shape | fields)
    model = make.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # transformers starts norms at one and biases at zero
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(VOCABULARY))
    return model


def expected_states(model: torch.nn.Module, ids: Sequence[int], second: int = 0) -> torch.Tensor:
    """By transformers: `[len(ids), hidden]`."""
    types = torch.zeros(1, len(ids), dtype=torch.int64)
    types[0, second or len(ids) :] = 1
    with torch.no_grad():
        return model(torch.tensor([ids]), token_type_ids=types, output_hidden_states=True).hidden_states[-1][0]
