"""Schemas of tools as programs write them, drawn at random, and arguments that are valid by them."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

KEYS = ("city", "n", "größe", "x_y", "a.b")
NAMES = ("City", "a/b", "a b", "a~b", "größe", "Rate%", "Page[int]", "~1")
WORDS = (
    "a", "B", " ", '"', "\\", "{", "}", "[", "]", "\n", "\t", "é", "🙂", "<", "</function>", "<parameter=", "null", "7",
    "</tool_call>", "<|end|>", "[ARGS]", "```", ",", ": ",
)  # fmt: skip
NULLS = ("null", "none")


class Drawn(NamedTuple):
    """A schema, and what draws a value that is valid by it."""

    schema: Any
    value: Callable[[], Any]


class Tool(NamedTuple):
    parameters: dict[str, Any]
    arguments: dict[str, Any]


def text(dice: random.Random) -> str:
    return "".join(dice.choices(WORDS, k=dice.randrange(6)))


class Tools:
    """Of one draw: `made` is what its references lead to."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._where = dice.choice(["$defs", "definitions"])
        self._names = dice.sample(NAMES, len(NAMES))
        self.made: dict[str, Any] = {}

    def tool(self) -> Tool:
        """Parameters behind a reference or in parts, and arguments in their order."""
        dice = self._dice
        of_keys: dict[str, Drawn] = {}
        for key in dice.sample(KEYS, dice.randrange(1, len(KEYS))):
            of_keys[key] = self._property(of_keys)
        required = [key for key in of_keys if dice.random() < 0.5]
        arguments = {key: one.value() for key, one in of_keys.items() if key in required or dice.random() < 0.5}
        schemas = {key: one.schema for key, one in of_keys.items()}
        whole: dict[str, Any] = {"type": "object", "properties": schemas, "required": required}
        if dice.random() < 0.3:
            whole["additionalProperties"] = False
        points = "#/properties/" in str(schemas)
        if dice.random() < 0.2 and not points:
            self.made["Root"] = whole
            whole = {"$ref": f"#/{self._where}/Root"}
        return Tool({**whole, **({self._where: self.made} if self.made else {})}, arguments)

    def _property(self, others: dict[str, Drawn]) -> Drawn:
        dice = self._dice
        # As zod writes what it has said before.
        if others and dice.random() < 0.2:
            key = dice.choice([*others])
            return Drawn({"$ref": f"#/properties/{self._fragment(key)}"}, others[key].value)
        drawn = self._leaf()
        for _ in range(dice.randrange(4)):
            drawn = self._wrapped(drawn)
        return drawn

    def _wrapped(self, inner: Drawn) -> Drawn:
        dice, (schema, value) = self._dice, inner
        match dice.randrange(5):
            case 0 | 1 if self._names:
                name = self._names.pop()
                if isinstance(schema, dict) and "$ref" not in schema and dice.random() < 0.2:
                    self.made[name] = {"$anchor": "here" + str(len(self.made)), **schema}
                    return Drawn({"$ref": "#" + self.made[name]["$anchor"], "title": "Of an anchor"}, value)
                self.made[name] = schema
                return Drawn({"$ref": f"#/{self._where}/{self._fragment(name)}"}, value)
            case 2:
                return Drawn({"allOf": [schema], "description": "As pydantic 1 writes it"}, value)
            case 3:

                def optional() -> Any:
                    drawn = value()
                    is_null = isinstance(drawn, str) and drawn.strip().lower() in NULLS
                    return None if is_null or dice.random() < 0.3 else drawn

                union = [schema, {"type": "null"}]
                dice.shuffle(union)
                return Drawn({"anyOf": union}, optional)
            case _:
                return inner

    def _fragment(self, name: str) -> str:
        step = name.replace("~", "~0").replace("/", "~1")
        return quote(step, safe=self._dice.choice(["", "~"])) if "%" in step or self._dice.random() < 0.7 else step

    def _leaf(self) -> Drawn:
        dice = self._dice
        leaves: list[Callable[[], Drawn]] = [
            lambda: Drawn({"type": "integer"}, lambda: dice.randrange(-99, 10**6)),
            lambda: Drawn({"type": "number"}, lambda: dice.choice([dice.random(), 3, -2.5])),
            lambda: Drawn({"type": "boolean"}, lambda: dice.random() < 0.5),
            lambda: Drawn({"type": "string"}, lambda: text(dice)),
            lambda: Drawn({"type": ["integer", "null"]}, lambda: dice.choice([None, 7])),
            lambda: Drawn({"enum": ["Rome", "none", "7"]}, lambda: dice.choice(["Rome", "none", "7"])),
            lambda: Drawn({"enum": [1, 2, "two", None]}, lambda: dice.choice([1, 2, "two", None])),
            lambda: Drawn({"const": dice.choice(["x y", 7, True])}, lambda: None),
            lambda: Drawn({"type": "array", "items": {"type": "string"}}, lambda: [text(dice), text(dice)]),
            lambda: Drawn({"properties": {"k": {"type": "integer"}}}, lambda: {"k": dice.randrange(9)}),
            self._recursive,
        ]
        drawn = dice.choice(leaves)()
        return Drawn(drawn.schema, lambda: drawn.schema["const"]) if "const" in drawn.schema else drawn

    def _recursive(self) -> Drawn:
        dice = self._dice

        def value(depth: int = 0) -> Any:
            return {"next": None if depth > 2 or dice.random() < 0.5 else value(depth + 1)}

        self.made["Node"] = {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": f"#/{self._where}/Node"}, {"type": "null"}]}},
            "required": ["next"],
        }
        return Drawn({"$ref": f"#/{self._where}/Node"}, value)


def drawn_tool(dice: random.Random) -> Tool:
    return Tools(dice).tool()
