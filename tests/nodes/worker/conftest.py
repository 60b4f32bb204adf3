"""Keeps torch's threads from spinning while others want the cores."""

from nodes.worker.environment import prepare_environment

prepare_environment()
