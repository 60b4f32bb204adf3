"""What the gateway logs about a request that took long."""

from typing import Any
from unittest.mock import Mock

import pytest

from nodes.gateway.events import SlowRequest
from nodes.gateway.request_account import RequestAccount
from nodes.gateway.request_names import UNNAMED
from nodes.protocol import Route
from nodes.request import Stages


@pytest.mark.parametrize(
    ("first_token_s", "told"), [(-1.0, {}), (0.0, {"first_token_s": 0.0}), (5.0, {"first_token_s": 5.0})]
)
def test_a_slow_request_without_a_token_has_no_time_of_the_first(first_token_s: float, told: dict[str, Any]) -> None:
    ctx = Mock()
    RequestAccount(ctx).slow(
        SlowRequest("r", 31.0, 0.25, Stages(0.0, 0.0, 0.0, 0.0), first_token_s, 14.0, 2, Route(decode="d")), UNNAMED
    )
    logged = ctx.log.warning.call_args.kwargs
    assert {name: value for name, value in logged.items() if name == "first_token_s"} == told
