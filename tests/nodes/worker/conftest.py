"""Makes `torch_running` importable; keeps torch's threads from spinning while others want the cores."""

import sys
from pathlib import Path

from nodes.worker.environment import prepare_environment

prepare_environment()
sys.path.insert(0, str(Path(__file__).parent))
