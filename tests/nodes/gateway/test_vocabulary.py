"""The bytes of tokens at a gateway: asked for once, shared, and asked for again after a failure."""

import asyncio
import struct
from typing import Any

import pytest

from mesh.actor import Answer
from mesh.address import Address
from nodes.gateway.asked.asked_once import AskedOnce
from nodes.gateway.asked.vocabulary import vocabulary_of
from nodes.gateway.errors import Internal, Unavailable
from nodes.protocol import Detokenized, VocabularyIs

OFFSETS = struct.pack("<4I", 0, 1, 1, 3)
WHOLE = VocabularyIs(num_tokens=3, end_token_ids=[2])


def answer(message: Any = WHOLE, *buffers: bytes) -> Answer:
    return Answer(message, buffers, Address("tok", 1))


async def test_calls_share_one_question() -> None:
    asked: list[asyncio.Future[Answer]] = []

    async def ask() -> Answer:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    async def calls(num: int, question: int) -> list[Any]:
        waiting = [asyncio.ensure_future(source.get()) for _ in range(num)]
        async with asyncio.timeout(5):
            while len(asked) < question:
                await asyncio.sleep(0)
        return waiting

    source = AskedOnce(ask, vocabulary_of)
    waiting = await calls(3, 1)
    waiting[0].cancel()
    asked[0].set_exception(Unavailable("no tokenizer", code="no_tokenizer", retry_after_s=1))
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in failed] == [asyncio.CancelledError, Unavailable, Unavailable]
    waiting = await calls(2, 2)
    # One that leaves does not take the answer from the other.
    waiting[0].cancel()
    await asyncio.sleep(0)
    asked[1].set_result(answer(WHOLE, OFFSETS, b"abc"))
    vocabulary = await waiting[1]
    assert [vocabulary.bytes_of(token_id) for token_id in (-1, 0, 1, 2, 3)] == [b"", b"a", b"", b"bc", b""]
    assert vocabulary.end_token_ids == (2,)
    assert await source.get() is vocabulary
    assert len(asked) == 2


@pytest.mark.parametrize(
    "given",
    [
        answer(Detokenized(text="abc"), OFFSETS, b"abc"),
        answer(WHOLE),
        answer(WHOLE, OFFSETS),
        answer(WHOLE, OFFSETS[:-4], b"abc"),
        answer(WHOLE, OFFSETS, b"abcd"),
        answer(VocabularyIs(num_tokens=-1), b"", b""),
        answer(VocabularyIs(num_tokens=4), OFFSETS, b"abc"),
    ],
)
async def test_what_does_not_fit(given: Answer) -> None:
    async def ask() -> Answer:
        return given

    with pytest.raises(Internal):
        await AskedOnce(ask, vocabulary_of).get()
