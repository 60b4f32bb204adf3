"""Published encoders: the last hidden states of whole texts are those of transformers."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.nodes.worker.encoder_running import encoded, expected_states
from tests.nodes.worker.torch_running import make_runner
from tests.real_models.folders import folder_of
from tests.real_models.texts import PROMPTS

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_minilm(kernels: str) -> None:
    folder = folder_of("all-minilm-l6-v2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = [*PROMPTS.values(), ("a first text", "and a second one")]
    inputs = [
        tokenizer(*([text] if isinstance(text, str) else text), truncation=True, max_length=512) for text in texts
    ]
    seconds = [types.index(1) if 1 in types else 0 for types in (one["token_type_ids"] for one in inputs)]
    ids = [one["input_ids"] for one in inputs]
    assert seconds[-1]
    assert max(map(len, ids)) == 512
    found = encoded(make_runner(folder, num_pages=2000, kernels=kernels), *ids, seconds=seconds)
    for states, own, second in zip(found, ids, seconds, strict=True):
        assert torch.allclose(states, expected_states(model, own, second), atol=1e-4, rtol=0)
