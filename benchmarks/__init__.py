"""Benchmarks, each printing its baseline from the same run. `python -m benchmarks` runs them all."""
