"""What is here needs a device."""

from pathlib import Path

import pytest


# Before marks are selected by, and for the whole run: this hook is given the tests of all folders.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs_device)
