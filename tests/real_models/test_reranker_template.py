"""Qwen3-Reranker's prompts: the ids that its model card makes of a query and a document, with Qwen3's tokenizer."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.vectors.form import FormReader
from nodes.gateway.surfaces.vectors.routes import VECTORS
from nodes.models.pooling import Pooling
from nodes.tokenizer.texts.encoding import load_encoder
from nodes.tokenizer.texts.truncation import Truncation
from tests.real_models.folders import folder_of, spec_of

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
AWKWARD = st.sampled_from([" a", "\n\nb", "  c d", "(x)", "1 2", "\tq", "你好", "🙂", ": :", "<|im_end|>", "'s"])
TEXTS = AWKWARD | st.text(min_size=1, max_size=40)


def test_ids_are_those_of_the_model_card(tmp_path: Path) -> None:
    config = GatewayConfig(
        model_name="m", context_length=4096, pooling=Pooling(pool="last", kind="yes_no"), hidden_size=2
    )
    reader = FormReader(VECTORS["/rerank"], config)
    folder = folder_of("tokenizers/qwen3")
    reference, encoder = AutoTokenizer.from_pretrained(folder), load_encoder(spec_of(folder, tmp_path))

    def of(text: str) -> list[int]:
        return reference.encode(text, add_special_tokens=False)

    @settings(max_examples=300, deadline=None, database=None)
    @given(TEXTS, TEXTS, st.integers(0, 8))
    def compare(query: str, document: str, num_kept: int) -> None:
        body = msgspec.json.encode({"query": query, "documents": [document]})
        inputs = reader.job(body, "r").own.inputs
        before, after = of(PREFIX), of(SUFFIX)
        content = of(f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}")

        def ids(most: int) -> list[int]:
            truncation = Truncation(most, keeps_first=True)
            return encoder.encode_pair(
                inputs.texts[0], inputs.seconds[0], add_special_tokens=False, after=inputs.after, truncation=truncation
            ).token_ids

        assert ids(0) == [*before, *content, *after]
        # The card cuts the content from its end, which is the document's.
        shown = of(f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>:")
        kept = content[: len(shown) + num_kept]
        assert ids(len(before) + len(shown) + num_kept + len(after)) == [*before, *kept, *after]

    compare()
