"""Benchmarks; each prints its baseline from the same run. `python -m benchmarks` runs them all."""
