"""Benchmarks that need a CUDA device. None has been run on one yet.

Each prints lines that begin with `figure |` (`figures.py`), with a physical limit or a peer from the same run.
"""
