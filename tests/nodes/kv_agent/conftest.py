"""Makes `fake_devices` importable, the one of the KV store's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "kvstore"))
