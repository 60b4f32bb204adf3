"""Makes `gpu_running` and what the CPU's tests of workers share importable; nothing here runs without a CUDA device."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "nodes/worker"), str(TESTS / "nodes/worker/cuda")]
