"""Structured output: the answer is a text of a grammar, and ends where the grammar ends."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields
from nodes.asks.edits import Editor
from nodes.asks.grammar_fields import FIELDS, Kind, wanted_of
from nodes.asks.grammar_text import check_grammar


class Grammar(Ask, frozen=True):
    """`text` is of `kind`, as `param`, the client's field, says. `strict`: what cannot be enforced is refused.

    `goes_on`: it does not end before it must, which is what is left of `ignore_eos`. `after`, if not empty, is Lark of
    what comes before, in which `@answer` stands for the text.
    """

    kind: Kind
    text: str
    param: str
    strict: bool = False
    goes_on: bool = False
    after: str = ""

    name: ClassVar[str] = "grammar/2"
    looks_back: ClassVar[bool] = True
    ends: ClassVar[bool] = True
    is_checked: ClassVar[bool] = True
    chat_fields: ClassVar[Fields] = FIELDS
    text_fields: ClassVar[Fields] = FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        wanted = wanted_of(body)
        return None if wanted is None else cls(*wanted, goes_on=bool(body["ignore_eos"]))

    @property
    @override
    def field(self) -> str:
        return self.param

    @classmethod
    @override
    def is_possible(cls, model: DrawnModel) -> bool:
        from nodes.asks.matching import vocabulary_of

        if model.spec is not None and model.end_token_ids and not model.spec.tokenizer_path:
            return True  # A tokenizer made in code: it is loaded when somebody needs it.
        try:
            vocabulary_of(model)
        except (KeyboardInterrupt, SystemExit):
            raise
        # Whatever the libraries make of a tokenizer, panics included: the model is served without grammars.
        except BaseException:  # noqa: BLE001
            return False
        return True

    @override
    def check(self) -> list[str]:
        return check_grammar(self.kind, self.text, self.param, strict=self.strict)

    @override
    def editor(self, model: DrawnModel) -> Editor:
        from nodes.asks.matching import editor_of

        return editor_of(self.kind, self.text, model, goes_on=self.goes_on, after=self.after)
