"""How many tokens prompt and output may have together, and what is said where they have more.

`cli` works out a `ServedContext` from the model and the pools; tokenizer, gateway and scheduler refuse by it. Clients
that look at the text of an error look for the first sentence of `over_context`, as OpenAI words it.
"""

from mesh.wire.message import Part


class ServedContext(Part, frozen=True):
    """The context that a mesh serves, in tokens.

    `length` is what a request may have, `model_length` what the model was made for, `kv_tokens` what the smallest pool
    holds in which requests are decoded, 0 where that is not known. `more_by`: what gives more where the pool is the
    limit, else empty.
    """

    length: int
    model_length: int
    kv_tokens: int = 0
    more_by: str = ""

    def __str__(self) -> str:
        """For operators: what it is, and why."""
        share = "" if self.length == self.model_length else f" of the model's {self.model_length:,}"
        hint = f": give it more by {self.more_by}" if self.more_by else ""
        pool = f"KV: {self.kv_tokens:,} tokens; " if self.kv_tokens else ""
        return f"{pool}context {self.length:,}{share}{hint}"


def over_context(context_length: int, where: str, num_prompt: int, num_output: int = 0) -> str:
    """For clients: `num_prompt` tokens in `where` (`messages` or `prompt`) and `num_output` more are too many.

    Their libraries tell this error from others by its first sentence and read the number in it, so no separators.
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
    """The same of a text that was not even encoded: no tokenization makes more than `max_chars` characters fit."""
    return (
        f"This model's maximum context length is {context_length} tokens. However, there are more than {max_chars} "
        f"characters in your {where}, which are more tokens however they are cut. Please reduce the length of the "
        f"{where}."
    )
