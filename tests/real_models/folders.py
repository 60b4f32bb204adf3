"""Where the published models are, and what kvmesh makes of a folder that has a tokenizer and no weights."""

import json
import os
from pathlib import Path

import pytest

from nodes.model_spec.directory import read_description
from nodes.models.spec import ModelSpec

VARIABLE = "TEST_MODELS"
"""Not KVMESH_...: `meshctl` would warn of a setting that it does not know."""
_TINY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"
_MOST_TOKENS = 1 << 19


def folder_of(name: str) -> Path:
    """The folder of a published model or tokenizer. Skips the test if there is none."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip("no published models given: make test-all MODELS=DIR, or TEST_MODELS=DIR (CONTRIBUTING.md)")
    folder = Path(given).expanduser() / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{VARIABLE} has no {name}/tokenizer.json (CONTRIBUTING.md names the folders)")
    return folder


def spec_of(tokenizer: Path, scratch: Path) -> ModelSpec:
    """The description of a model that has this tokenizer, read from `scratch`; everything else is the bundled one's."""
    for file in tokenizer.iterdir():
        (scratch / file.name).symlink_to(file)
    config = json.loads((_TINY / "config.json").read_text()) | {"vocab_size": _MOST_TOKENS}
    (scratch / "config.json").write_text(json.dumps(config))
    return read_description(scratch)
