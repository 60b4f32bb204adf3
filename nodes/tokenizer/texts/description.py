"""What `/tokenizer_info` says: `tokenizer_config.json` as it is served, with what is in force in place of what it says.
Reads that file; used by `nodes/tokenizer/actor.py`.
"""

import json
from pathlib import Path
from typing import Any, Final

from nodes.model_spec import ModelSpec
from nodes.model_spec.small_files import SmallFiles
from nodes.model_spec.token_files import TOKENIZER_CONFIG

_MOST_BYTES: Final = 8 << 20
"""Half of what the body of a message may have; Gemma 3's file, the largest known, has 1.2 MB."""
_CLASS: Final = "PreTrainedTokenizerFast"
"""transformers' class for any tokenizer.json, and so for tokenizers whose file names no class."""


def describe_tokenizer(spec: ModelSpec, template: str, context_length: int) -> bytes:
    """A JSON object. A file that is not strict JSON, or too long, is left out. Raises `nodes.model_spec.ModelError`."""
    own: dict[str, Any] = {
        "model_max_length": context_length,
        "tokenizer_class": _CLASS,
        **spec.special_tokens,
        **({"chat_template": template} if template else {}),
    }
    given = SmallFiles(Path(spec.path)).find(TOKENIZER_CONFIG) if spec.path else {}
    named = given.get("tokenizer_class")
    whole = {**given, **own, "tokenizer_class": named if isinstance(named, str) else _CLASS}
    try:
        document = json.dumps(whole, allow_nan=False).encode()
    except ValueError:
        # NaN, which Python reads and JSON does not have.
        document = b""
    return document if 0 < len(document) <= _MOST_BYTES else json.dumps(own).encode()
