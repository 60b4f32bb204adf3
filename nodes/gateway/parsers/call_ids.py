"""Ids of calls: the same for the same call of the same sample, however often an answer is made again."""

import hashlib
import string
from typing import Final

_ALPHABET: Final = string.ascii_letters + string.digits
_SHORT: Final = 9


def call_id(request_id: str, index: int, *, short: bool = False) -> str:
    """`call_` and 24 hexadecimal digits; or, `short`, nine letters and digits, the only ids in Mistral's templates."""
    digest = hashlib.sha256(f"{request_id} {index}".encode()).digest()
    if not short:
        return f"call_{digest.hex()[:24]}"
    number = int.from_bytes(digest)
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(_SHORT))
