"""An ask: one thing that a request may want of its draws, from the HTTP fields to the worker's editor.

Each ask is one file here: its HTTP fields and their check, what goes over the wire, and its editor. The table is in
`nodes/asks/__init__.py`. Gateways read asks from bodies, workers make editors of them; every role between them carries
`Asked`, a name with bytes, and knows none. Imported by roles that are forked, so without numpy at import (OpenBLAS
would start threads).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

from mesh.errors import TypedError
from mesh.wire.message import HotPart
from nodes.asks.edits import Editor, LogprobsOf, RowReads
from nodes.models.spec import ModelSpec
from nodes.request import SamplingDefaults


class InvalidAsk(TypedError, code="invalid_value"):
    """A field of a request has a value that cannot be served; `param` names it."""


class UnsupportedSchema(InvalidAsk, code="unsupported_schema"):
    """A schema has a keyword that cannot be enforced, and the client wants all of it enforced."""


class AskLimits(NamedTuple):
    """What a gateway knows of the model when it reads asks. `vocab_size` 0: not known, the ids are not checked.

    `defaults` apply to fields that a request leaves out. `logprobs_of`: see `RowReads`.
    """

    vocab_size: int = 0
    defaults: SamplingDefaults = SamplingDefaults()
    logprobs_of: LogprobsOf = "raw"

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Raise InvalidAsk for an id outside of the vocabulary."""
        if self.vocab_size and token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidAsk(
                f"Token id {max(token_ids)} in '{param}' is not in the vocabulary of {self.vocab_size} tokens.", param
            )


class DrawnModel(NamedTuple):
    """What a worker's editors know of its model: the width of its logits, and the ids that end an answer.

    `spec` is for those that need its tokenizer; None: there is none to be had.
    """

    vocab_size: int
    end_token_ids: tuple[int, ...] = ()
    spec: ModelSpec | None = None


Fields = Mapping[str, Any]
"""HTTP fields by name, each with the type of its value as msgspec checks it."""


class Ask(HotPart, frozen=True):
    """Base of all asks; the fields of a subclass are its value on the wire, a MessagePack array.

    `name` ends in a version: a worker of another version computes other bits, or does not know the ask, and gets no
    request with it. `chat_fields` and `text_fields` are the HTTP fields of the two routes.
    """

    name: ClassVar[str]
    looks_back: ClassVar[bool] = False
    """Whether its editor needs the tokens before the drawn one."""
    ends: ClassVar[bool] = False
    """Whether it says when an answer is over: an end id ends it then, in spite of `ignore_eos`."""
    is_checked: ClassVar[bool] = False
    """Whether a tokenizer has to `check` it, in a process that can be killed, before it is sent."""
    chat_fields: ClassVar[Fields] = {}
    text_fields: ClassVar[Fields] = {}

    @classmethod
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        """The ask of a request, from the fields of its body (None: not given); None: it asks for nothing.

        Raises InvalidAsk.
        """
        raise TypeError(f"{cls.__name__} does not say how it is read")

    @property
    def field(self) -> str | None:
        """The HTTP field that errors about all of it name."""
        return next(iter(self.chat_fields), None)

    @classmethod
    def is_possible(cls, model: DrawnModel) -> bool:
        """Whether a worker of this model can do it. Called once when it starts, and may take seconds."""
        return True

    def check(self) -> list[str]:
        """What of it will be ignored, in words. May run out of time and memory, panic or die. Raises InvalidAsk."""
        return []

    def texts(self) -> list[str]:
        """Texts whose token ids it needs, each encoded by itself without special tokens."""
        return []

    def with_token_ids(self, token_ids: list[list[int]]) -> Self:
        """The ask with the ids of its `texts`, in their order."""
        return self

    def editor(self, model: DrawnModel) -> Editor | None:
        """Made each time a sequence is opened at a worker; None: the ask edits nothing."""
        return None

    def reads(self) -> RowReads | None:
        """What it reads beside a drawn token; None: nothing."""
        return None
