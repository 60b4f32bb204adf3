"""Environment variables to set before torch is imported: its libraries read them once, when they are loaded."""

import os
from typing import Final

TORCH_ENVIRONMENT: Final = {
    # Spin a little: waking a sleeping thread costs a tenth of a decode step, but two workers that spin on the same
    # cores cost several times the work.
    "GOMP_SPINCOUNT": "5000",
    # Weights in huge pages: the linear layers alone took 10 to 17 % less. In whole steps the noise hid the difference.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Defaults; what the operator has set is kept."""


def prepare_environment() -> None:
    """Set the defaults in this process."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
