"""A question to an actor, without a mesh: what it is answered is kept."""

from typing import Any

from mesh.address import Address


class RecordedCall:
    """`answers`: replies, and of refusals code, whether to ask again, and parameter; `why`: words of the last."""

    def __init__(self, message: Any = None, sender: Address | None = None) -> None:
        self.message, self.sender = message, sender
        self.answers: list[Any] = []
        self.why = ""

    @property
    def answer(self) -> Any:
        """The last reply, or the last refusal's code; None before there is any."""
        last = self.answers[-1] if self.answers else None
        return last[0] if isinstance(last, tuple) else last

    def reply(self, message: Any, buffers: Any = ()) -> None:
        self.answers.append(message)

    def fail(self, code: str, message: str, *, retryable: bool = False, param: str | None = None, **_: Any) -> None:
        self.answers.append((code, retryable, param))
        self.why = message
