"""Makes `torch_running` importable; keeps torch's threads from spinning while others want the cores."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
sys.path.insert(0, str(Path(__file__).parent))
