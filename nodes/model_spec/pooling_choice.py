"""`--pooling`: how vectors are made, if the user says so instead of the model's folder; and what reads a model's head.

    auto                         as the folder says
    last | mean | cls            embeddings by this pooling, as they come
    last,normalize and so on     the same, of length one
    yes_no                       scores by the logits of the tokens `yes` and `no`, as of Qwen3-Reranker

Called by `resolve.py` and `directory.py`.
"""

from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from nodes.model_spec.pooling_files import yes_no
from nodes.model_spec.small_files import MOST_TOKENIZER_BYTES, SmallFiles
from nodes.model_spec.tensor_names import EMBEDDING, HEAD
from nodes.models.errors import ModelUnsupported
from nodes.models.pooling import Pool, Pooling
from nodes.models.spec import ModelSpec

PoolingChoice = Literal["auto", "last", "mean", "cls", "last,normalize", "mean,normalize", "cls,normalize", "yes_no"]
"""`auto`: as the folder says."""


def with_pooling(spec: ModelSpec, choice: PoolingChoice) -> ModelSpec:
    """The model with vectors as chosen. Prompts, longest input and products of their own files behind the pooling stay
    as the folder says; a head of its architecture is then not used.

    Raises ModelUnsupported if it has no tokens `yes` and `no`, or no head of words.
    """
    if choice == "auto":
        return spec
    said = spec.pooling or Pooling(pool="last")
    if choice == "yes_no":
        if not spec.has_head:
            raise ModelUnsupported(f"{spec.name} has no head, so no token has a logit. Leave --pooling {choice} out.")
        words = yes_no(spec.hidden_size, *_ids_of(spec, ("no", "yes")))
        made = msgspec.structs.replace(
            words, prompts=said.prompts, default_prompt=said.default_prompt, max_length=said.max_length
        )
        return with_rows_of_head(msgspec.structs.replace(spec, pooling=made))
    pool, _, normalize = choice.partition(",")
    made = msgspec.structs.replace(
        said,
        pool=cast("Pool", pool),
        kind="embedding",
        normalize=bool(normalize),
        dense=tuple(dense for dense in said.dense if dense.path),
        labels=(),
        activation="identity",
    )
    return msgspec.structs.replace(spec, pooling=made)


def reads_head(pooling: Pooling) -> bool:
    """Whether scores are logits of the model's own words."""
    return any(dense.rows for dense in pooling.dense)


def with_rows_of_head(spec: ModelSpec) -> ModelSpec:
    """The model with the tensor named that its head is, where scores are rows of that: a tied one is its embedding."""
    if spec.pooling is None or not reads_head(spec.pooling):
        return spec
    name = EMBEDDING if spec.tie_word_embeddings else HEAD
    dense = tuple(msgspec.structs.replace(one, weight=name) if one.rows else one for one in spec.pooling.dense)
    return msgspec.structs.replace(spec, pooling=msgspec.structs.replace(spec.pooling, dense=dense))


def _ids_of(spec: ModelSpec, words: tuple[str, str]) -> list[int]:
    """The ids of tokens, as `tokenizer.json` has them. Raises ModelUnsupported."""
    path = Path(spec.tokenizer_path)
    document = SmallFiles(path.parent).require(path.name, MOST_TOKENIZER_BYTES) if spec.tokenizer_path else {}
    model: Any = document.get("model")
    vocabulary: Any = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    known = cast("dict[str, Any]", vocabulary) if isinstance(vocabulary, dict) else {}
    ids = [known.get(word) for word in words]
    for word, i in zip(words, ids, strict=True):
        if not isinstance(i, int) or not 0 <= i < spec.vocab_size:
            raise ModelUnsupported(
                f"{spec.name} has no token {word!r}, by whose logit --pooling yes_no scores. Give another --pooling."
            )
    return cast("list[int]", ids)
