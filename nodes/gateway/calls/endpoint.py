"""What all routes have in common: a boundary that no fault crosses, behind which errors are answers."""

from collections.abc import Coroutine
from typing import Any, Final

from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.errors import ApiError, Internal

CLIENT_LEFT: Final = 499
"""The status counted for an exchange whose client left before its answer; nothing is sent."""


async def answer(call: Call, serving: Coroutine[Any, Any, None]) -> None:
    """Have it answered by `serving`; raises nothing but cancellation, and what `fail` does."""
    try:
        await serving
    except ApiError as error:
        # Logged before it is sent: a client that leaves meanwhile does not undo the failure.
        call.observer.failed(call.names, error)
        await call.fail(error)
    except ClientLeft:
        pass
    except Exception as error:  # noqa: BLE001 - supervision boundary: one call must not take others with it
        told = Internal("The gateway failed to serve this request; its log says how.")
        call.observer.broke(call.names, error, told)
        await call.fail(told)
