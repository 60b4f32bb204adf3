"""What an answer is made of, in order. The sources of all events, joined, are the model's text to the letter."""

from typing import Final, NamedTuple, TypeAlias


class Text(NamedTuple):
    """A piece of the answer that the client sees as its content."""

    text: str

    @property
    def source(self) -> str:
        return self.text


class Reasoning(NamedTuple):
    """A piece of the reasoning before the answer."""

    text: str

    @property
    def source(self) -> str:
        return self.text


class CallBegin(NamedTuple):
    """A call of an offered tool begins; `call_index` counts from 0. `source` reaches back over its opening mark."""

    call_index: int
    name: str
    source: str


class CallArguments(NamedTuple):
    """More of the call's arguments: JSON text, as the model wrote it or, where it writes no JSON, made from that."""

    call_index: int
    text: str
    source: str


class CallEnd(NamedTuple):
    """The call ends. If not `whole`, it was cut or went wrong: its arguments are no JSON object."""

    call_index: int
    whole: bool
    source: str


class Mark(NamedTuple):
    """What nobody sees: marks, and blanks between calls."""

    source: str


class End(NamedTuple):
    """Nothing more comes."""

    source: str = ""


Event: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd | Mark | End
END: Final = End()
