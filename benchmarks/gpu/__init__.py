"""Benchmarks that need a CUDA device. None has been run on one yet.

Each prints lines that begin with `figure |` (`figures.py`), with its physical limit or a peer of the same run beside.
"""
