"""What all routes have in common: errors as answers, a count of answers, and a boundary that no fault crosses."""

from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.clients import ClientNames
from nodes.gateway.errors import OPENAI_ERRORS, ApiError, ErrorForm, Internal
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.http.call import ClientLeft, HttpCall

Handler = Callable[[HttpCall], Awaitable[None]]

CLIENT_LEFT = 499
"""The status counted for an exchange whose client left before its answer; nothing is sent."""


class Endpoint:
    """A route's handler as an ASGI application. With `keys`, it answers those only who bring one."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        observer: HttpObserver,
        id_prefix: str = "req-",
        errors: ErrorForm = OPENAI_ERRORS,
        keys: Authorization | None = None,
        clients: ClientNames | None = None,
    ) -> None:
        self._route = route
        self._handler = handler
        self._observer = observer
        self._id_prefix = id_prefix
        self._errors = errors
        self._keys = keys
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises nothing but cancellation."""
        call = HttpCall(scope, receive, send, self._id_prefix, self._errors, self._clients)
        try:
            await self._guard(call)
        except ClientLeft:
            pass
        finally:
            self._observer.answered(self._route, call.status or CLIENT_LEFT)

    async def _guard(self, call: HttpCall) -> None:
        try:
            if self._keys is not None:
                call.belongs_to(self._keys.key_of(call.headers))
            await self._handler(call)
        except ApiError as error:
            # Logged before it is sent: a client that leaves meanwhile does not undo the failure.
            self._observer.failed(call.names, error)
            await call.fail(error)
        except ClientLeft:
            raise
        except Exception as error:  # noqa: BLE001 - supervision boundary: one call must not take others with it
            answer = Internal("The gateway failed to serve this request.")
            self._observer.broke(call.names, error, answer)
            await call.fail(answer)
