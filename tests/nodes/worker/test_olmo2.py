"""OLMo 2 agrees with transformers, on the CPU and by a device's operations, and is not cut for ranks."""

import ast
import re
from pathlib import Path

import pytest

from nodes.model_spec import TensorParallelUnfit, resolve_model
from tests.nodes.worker.test_parity import LINEAR, PLAIN, assert_all_agree, save_model


@pytest.mark.parametrize(("heads", "rope", "tied"), [((4, 2), PLAIN, False), ((3, 3), LINEAR, True)])
def test_olmo2(tmp_path: Path, heads: tuple[int, int], rope: dict[str, object], tied: bool) -> None:
    reference = save_model(tmp_path, "olmo2", heads=heads, hidden=48, rope=rope, tied=tied)
    assert_all_agree(tmp_path, reference)
    with pytest.raises(TensorParallelUnfit, match=r"go over all heads\. Use a tensor-parallel size of 1\."):
        resolve_model(str(tmp_path)).shard(0, 3)


def test_the_page_on_new_architectures_shows_all_of_it() -> None:
    root = Path(__file__).parents[3]
    [shown] = re.findall(r"```python\n(class Olmo2.*?)```", (root / "docs/architecture.md").read_text(), re.DOTALL)
    whole = ast.parse((root / "nodes/models/olmo2.py").read_text())
    for node in ast.walk(whole):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    code = [node for node in whole.body if isinstance(node, ast.ClassDef | ast.AnnAssign)]
    assert [ast.dump(node) for node in ast.parse(shown).body] == [ast.dump(node) for node in code]
