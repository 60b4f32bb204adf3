"""Clients of a storm against servers that are good or bad: what counts as lost, as different, as cut, as a gap."""

import asyncio
from typing import Any

import pytest

from cli.bench.client import Server
from cli.chaos.answer import Answer
from cli.chaos.asked import NUM_BODIES, Asked, Request
from cli.chaos.clients import NOTED_GAP_S, Clients, ask, undisturbed
from tests.cli.streaming import HEAD, chunk, event, streaming

DONE = chunk(b"data: [DONE]\n\n") + chunk(b"")
BODY: dict[str, Any] = {"prompt": "x", "stream": True}
PLAIN = Request(BODY)


def said(text: str, end: str | None = None) -> bytes:
    return chunk(event(choices=[{"index": 0, "text": text, "finish_reason": end}]))


GOOD = HEAD + said("a") + said("b", "length") + DONE
EXPECTED = [Answer("ab", finish_reason="length")]


async def after(answers, num_sent: int, *, is_excused: bool = False, request=PLAIN, timeout_s=5.0) -> Clients:
    """One client, once `num_sent` of its requests have ended."""
    async with streaming(answers) as server:
        target = Server.at(server.url)
        clients = Clients(target, EXPECTED, lambda _: request, 1, lambda *_: is_excused, timeout_s)
        async with asyncio.timeout(20.0):
            while sum(one.ended_s > 0 for one in clients.sent) < num_sent:
                await asyncio.sleep(0.01)
        await clients.stop()
    clients.sent = clients.sent[:num_sent]
    return clients


async def test_good_answers_are_neither_lost_nor_different() -> None:
    clients = await after(lambda _: (GOOD, "close"), 3)
    assert [(one.lost, one.different, one.is_cut) for one in clients.sent] == [("", "", False)] * 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((HEAD + said("a"), "close"), "ended_early"),
        ((HEAD + said("a"), "reset"), "reset"),
        ((HEAD + said("a"), "stall"), "timeout"),
        ((b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull", "close"), "status 503: full"),
        ((HEAD + chunk(event(error={"message": "gone"})), "close"), "error_event"),
    ],
)
async def test_what_is_not_whole_is_lost(answer, says) -> None:
    clients = await after(lambda _: answer, 1, timeout_s=0.5)
    assert says in clients.sent[0].lost


async def test_other_text_is_different_and_not_lost() -> None:
    clients = await after(lambda _: (HEAD + said("a") + said("x", "length") + DONE, "close"), 1)
    assert "differ from character 1" in clients.sent[0].different
    assert clients.sent[0].lost == ""


async def test_what_breaks_with_its_gateway_is_sent_again_until_it_is_answered() -> None:
    cut = (HEAD + said("a"), "reset")
    clients = await after(lambda number: cut if number < 2 else (GOOD, "close"), 3, is_excused=True)
    assert [(one.is_cut, one.lost, one.different) for one in clients.sent] == [(True, "", "")] * 2 + [(False, "", "")]
    status = (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "close")
    (one,) = (await after(lambda _: status, 1, is_excused=True)).sent
    assert "status 500" in one.lost, "a gateway that answers is not dead"


async def test_a_client_that_goes_away_is_judged_by_what_it_has_got() -> None:
    request = Request(BODY, cancel_after=1)
    (good,) = (await after(lambda _: (HEAD + said("a"), "stall"), 1, request=request)).sent
    assert (good.was_cancelled, good.lost, good.different) == (True, "", "")
    (bad,) = (await after(lambda _: (HEAD + said("b"), "stall"), 1, request=request)).sent
    assert "(cancelled)" in bad.different


async def test_a_slow_reader_gets_all_of_it_later_and_its_pauses_are_no_stalls() -> None:
    pause_s = 1.5 * NOTED_GAP_S
    async with streaming(lambda _: (GOOD, "close")) as server:
        answer, began = Answer(), asyncio.get_running_loop().time()
        await ask(Server.at(server.url), Request(BODY, pause_s=pause_s), answer)
        assert (answer.text, answer.broken) == ("ab", "")
        assert asyncio.get_running_loop().time() - began < 5.0
    assert (await after(lambda _: (GOOD, "close"), 2, request=Request(BODY, pause_s=pause_s))).gaps_s == []


async def test_stop_waits_for_answers() -> None:
    async with streaming(lambda _: (GOOD, "close")) as server:
        clients = Clients(Server.at(server.url), EXPECTED, lambda _: Request(BODY), 4, lambda *_: False)
        await asyncio.sleep(0)
        await clients.stop()
        assert len(clients.sent) == 4
        assert all(one.ended_s and not one.lost for one in clients.sent)


async def test_answers_of_a_quiet_mesh_come_in_the_order_of_the_requests() -> None:
    texts = "abcdefgh"
    async with streaming(lambda number: (HEAD + said(texts[number], "stop") + DONE, "close")) as server:
        answers = await undisturbed(Server.at(server.url), [Request(BODY)] * len(texts), 1, 5.0)
    assert "".join(answer.text for answer in answers) == texts


def test_requests_are_the_seeds_and_of_every_kind() -> None:
    asked, again, other = Asked("m", 1), Asked("m", 1), Asked("m", 2)
    requests = [asked.request(number) for number in range(600)]
    assert requests == [again.request(number) for number in range(600)]
    assert requests != [other.request(number) for number in range(600)]
    cancelled, slow = [one for one in requests if one.cancel_after], [one for one in requests if one.pause_s]
    assert len(cancelled) > 40
    assert len(slow) > 40
    assert all(one.is_streamed for one in cancelled + slow)
    assert sum(not one.is_streamed for one in requests) == 150
    assert {one.body["temperature"] for one in requests if not one.is_streamed} == {0.0, 1.0}
    # What is compared with a known answer differs from it in nothing but how caches know its prompt.
    for request in requests:
        known = asked.undisturbed("quiet")[request.index].body
        assert {**request.body, "cache_salt": ""} == {**known, "cache_salt": ""}
    assert {one.index for one in requests} == set(range(NUM_BODIES))
