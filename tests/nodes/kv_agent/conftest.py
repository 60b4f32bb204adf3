"""Makes `fake_devices`, the one of the KV store's tests, and `agent_world` importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "kvstore"))
sys.path.insert(0, str(Path(__file__).parent))
