"""Benchmarks are run by hand, so nothing else would notice that one of them cannot even start."""

import importlib

import pytest

from benchmarks.__main__ import BENCHMARKS


@pytest.mark.parametrize("name", [*BENCHMARKS, "peers", "hosts", "scale", "kv_store"])
def test_every_benchmark_can_be_started(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)
