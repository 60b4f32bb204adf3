"""Which tokens belong to a text that a stop string ends: those that begin before its end, in streams as well."""

import random

import pytest

from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.requests.outputs import CallOutput
from tests.nodes.detokenizer.test_core import batch, core, feed, opening, texts

ALPHABET = "abc€"
"""Some characters take several tokens of one byte, so that what is held back may be part of one."""


def said(dice: random.Random) -> tuple[str, list[str]]:
    text = "".join(dice.choices(ALPHABET, k=dice.randrange(1, 16)))
    stops = ["".join(dice.choices(ALPHABET, k=dice.randrange(1, 4))) for _ in range(dice.randrange(1, 3))]
    return text, stops


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("include", [False, True])
def test_text_tokens_and_what_is_past_agree_however_output_comes(seed: int, include: bool) -> None:
    dice = random.Random(seed)
    text, stops = said(dice)
    data = text.encode()
    # Where each byte's character begins, which is where its token does.
    begins = [len(data[:at].decode(errors="ignore")) for at in range(len(data))]
    detokenizer, output = core(), CallOutput(1, whole=False)
    shown, streamed, at, step, stop = "", list[int](), 0, 0, ""
    pieces: list[tuple[str, Tokens | None]] = []
    finish = None
    while at < len(data) and finish is None:
        count = min(dice.randrange(1, 5), len(data) - at)
        opens = [opening(stop=stops, include_stop=include)] if step == 0 else []
        is_last = at + count == len(data)
        ids = list(data[at : at + count])
        for delta in texts(
            feed(detokenizer, batch(ids, position=at, opens=opens, finish="length" if is_last else None))
        ):
            output.deliver(0, delta.text, len(delta.token_ids), 0, Tokens(delta.token_ids, [], delta.num_past))
            finish, stop = delta.finish_reason, delta.stop_string
            if finish is not None:
                output.end(0, End("r", finish, None, 1, 1, 0, 1.0, stop=stop or None))
            pieces += [(piece.text, piece.tokens) for piece in output.take()]
        at, step = at + count, step + 1
    for piece, tokens in pieces:
        assert tokens is not None
        shown += piece
        streamed += tokens.ids
        in_text = len(streamed) - tokens.num_past
        assert all(begin < len(shown) for begin in begins[:in_text]) or not stop, "none is shown before its text"
    num_drawn = output.samples[0].num_tokens
    assert streamed == list(data[:num_drawn]), "usage and ids have all that was drawn"
    _, last = pieces[-1]
    assert last is not None
    if stop:
        kept = num_drawn - last.num_past
        assert begins[:num_drawn] == sorted(begins[:num_drawn])
        assert kept == sum(begin < len(shown) for begin in begins[:num_drawn])
        assert text.startswith(shown)
        assert include == shown.endswith(stop) or not include
    else:
        assert (shown, last.num_past) == (text, 0)


def test_what_an_abort_leaves_is_all_there() -> None:
    output = CallOutput(1, whole=True)
    output.deliver(0, "a", 3, 0, Tokens([1, 2, 3], [], 2))
    output.end(0, End("r", "abort", None, 1, 1, 0, 1.0))
    (piece,) = output.take()
    assert piece.tokens == Tokens([1, 2, 3], [])
