"""How many tokens prompt and output may have together, and the error text if they have more.

`cli` derives a `ServedContext` from the model and the pools; tokenizer, gateway and scheduler refuse requests by it.
Clients that match on error texts look for the first sentence of `over_context`, which is OpenAI's wording.
"""

from mesh.wire.message import Part


class ServedContext(Part, frozen=True):
    """The context that a mesh serves, in tokens.

    `length` is the limit of a request, `model_length` that of the model, `kv_tokens` the capacity of the smallest pool
    in which requests are decoded, 0 if not known. `more_by`: the setting to raise if the pool is the limit, else empty.
    """

    length: int
    model_length: int
    kv_tokens: int = 0
    more_by: str = ""

    def __str__(self) -> str:
        """For operators: the context length and the reason for it."""
        share = "" if self.length == self.model_length else f" of the model's {self.model_length:,}"
        hint = f": for more, use {self.more_by}" if self.more_by else ""
        pool = f"KV: {self.kv_tokens:,} tokens; " if self.kv_tokens else ""
        return f"{pool}context {self.length:,}{share}{hint}"


def over_context(context_length: int, where: str, num_prompt: int, num_output: int = 0) -> str:
    """Error text for clients: `num_prompt` tokens in `where` (`messages` or `prompt`) plus `num_output` are too many.

    Client libraries recognize this error by its first sentence and parse the number in it, so no thousands separators.
    """
    limit = f"This model's maximum context length is {context_length} tokens."
    if num_prompt >= context_length:
        return (
            f"{limit} However, your {where} resulted in {num_prompt} tokens, which leaves none for the completion. "
            f"Please reduce the length of the {where}."
        )
    return (
        f"{limit} However, you requested {num_prompt + num_output} tokens ({num_prompt} in the {where}, {num_output} "
        f"in the completion). Please reduce the length of the {where} or completion."
    )


def over_context_in_chars(context_length: int, where: str, max_chars: int) -> str:
    """The same for a text that was not even encoded: under no tokenization do more than `max_chars` characters fit."""
    return (
        f"This model's maximum context length is {context_length} tokens. However, there are more than {max_chars} "
        f"characters in your {where}, which exceeds that limit under any tokenization. Please reduce the length of the "
        f"{where}."
    )
