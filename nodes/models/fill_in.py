"""How a model is asked for what stands between two texts (fill in the middle): by tokens of its vocabulary. Pure.

Models that are trained for it have three such tokens, under names that say which family they are of. A prompt with a
`suffix` becomes one text of the four or five pieces; where the family wants the suffix first, the prompt stands last.
"""

from collections.abc import Callable
from typing import Final

import msgspec


class FillIn(msgspec.Struct, frozen=True):
    """The tokens around a prompt and its suffix. With `suffix_first` the text is `between`, suffix, `before`, prompt,
    else `before`, prompt, `between`, suffix, `after`.
    """

    before: str
    between: str
    after: str = ""
    suffix_first: bool = False

    def text(self, prompt: str, suffix: str) -> str:
        if self.suffix_first:
            return f"{self.between}{suffix}{self.before}{prompt}"
        return f"{self.before}{prompt}{self.between}{suffix}{self.after}"


KNOWN: Final = (
    # Qwen2.5 and its Coder, Qwen3, CodeGemma.
    FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder and models with its tokenizer, Granite.
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder, DeepSeek V2 and V3: the bars and blocks are characters of their own.
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Codestral, and models with Mistral's tokenizer.
    FillIn("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


def fill_in_of(is_token: Callable[[str], bool]) -> FillIn | None:
    """The first family all of whose tokens a vocabulary has; None if there is none."""
    return next((one for one in KNOWN if all(map(is_token, filter(None, (one.before, one.between, one.after))))), None)
