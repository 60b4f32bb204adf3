"""Settings that contradict each other are refused with what to set instead."""

import pytest

from nodes.scheduler.config import ConfigError, SchedulerConfig


def config(**settings) -> SchedulerConfig:
    return SchedulerConfig(**{"group": "m", "worker": "w", "agent": "a", "context_length": 100, **settings})


def test_defaults_agree() -> None:
    assert config().pipeline_depth == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chunk_tokens": 8}, "multiple of the page size 16"),
        ({"chunk_tokens": 40}, "multiple of the page size 16"),
        ({"step_tokens": 256}, "set step_tokens to at least 272"),
        ({"pipeline_depth": 3}, "1 or 2"),
        ({"context_length": 1}, "at least 2"),
    ],
)
def test_contradictions(settings, says) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)
