"""Makes `torch_running` and the KV store's `fake_devices` importable.

Keeps torch's threads from spinning while others want the cores.
"""

import sys
from pathlib import Path

from nodes.worker.environment import prepare_environment

prepare_environment()
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "kvstore")]
