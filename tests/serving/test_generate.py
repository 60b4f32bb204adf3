"""/generate on a whole mesh with a model: beside /v1/completions, streamed and whole, and with a worker killed."""

import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.serving.conftest import APART

pytestmark = pytest.mark.process

PROMPTS = ["Bob has 7 green pears.", "Ann has 3 red apples."]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    return mesh_of(*APART)


def post(mesh: Any, path: str = "/generate", **body: Any) -> Any:
    answer = httpx.post(mesh.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(mesh: Any, victim: str = "", **body: Any) -> list[dict[str, Any]]:
    """The events; with a victim, that worker is killed after the third."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", mesh.url + "/generate", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return events
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if victim and len(events) == 3:
                    (pid,) = (one["pid"] for one in mesh.ps() if one["actor_id"] == victim)
                    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the stream has no end")


def test_it_says_what_completions_say(mesh: Any) -> None:
    params = {**GREEDY, "max_new_tokens": 12}
    found = post(mesh, text=PROMPTS, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    theirs = post(
        mesh, "/v1/completions", prompt=PROMPTS, temperature=0, ignore_eos=True, max_tokens=12, logprobs=2,
        return_token_ids=True,
    )  # fmt: skip
    for one, choice in zip(found, theirs["choices"], strict=True):
        meta, logprobs = one["meta_info"], choice["logprobs"]
        assert (one["text"], one["output_ids"]) == (choice["text"], choice["token_ids"])
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
            list(pair) for pair in zip(logprobs["token_logprobs"], choice["token_ids"], strict=True)
        ]
        assert [{entry[0] for entry in top} for top in meta["output_top_logprobs"]] == [
            set(sorted(top.values(), reverse=True)[:2]) for top in logprobs["top_logprobs"]
        ]
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(choice["prompt_token_ids"]), 12)
        # By ids, as trainers ask.
        again = post(mesh, input_ids=choice["prompt_token_ids"], sampling_params=params)
        assert again["output_ids"] == one["output_ids"]


def test_of_the_prompt(mesh: Any) -> None:
    body = {"text": PROMPTS[0], "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    found = post(mesh, **body, sampling_params={**GREEDY, "max_new_tokens": 1}, token_ids_logprob=[7, 9])
    meta = found["meta_info"]
    logprobs = meta["input_token_logprobs"]
    assert "".join(entry[2] for entry in logprobs) == PROMPTS[0]
    assert logprobs[0][0] is None
    assert all(entry[0] < 0 for entry in logprobs[1:])
    assert [entry[1] for entry in meta["output_token_ids_logprobs"][0]] == [7, 9]
    assert "output_top_logprobs" not in meta
    later = post(mesh, **body | {"logprob_start_len": 3}, sampling_params={**GREEDY, "max_new_tokens": 1})
    assert later["meta_info"]["input_token_logprobs"] == logprobs[3:]


def test_streamed_events_are_cumulative_and_a_death_does_not_show(mesh: Any) -> None:
    body = {"text": PROMPTS, "rid": "mine", "return_logprob": True, "sampling_params": {**GREEDY, "max_new_tokens": 60}}
    whole = post(mesh, **body)
    assert [one["meta_info"]["id"] for one in whole] == ["mine_0", "mine_1"]
    for victim in ("", "worker-decode-0"):
        last: dict[int, dict[str, Any]] = {}
        for event in streamed(mesh, victim, **body):
            before = last.get(event["index"], {"text": "", "output_ids": []})
            assert event["text"].startswith(before["text"])
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            last[event.pop("index")] = event
        for number, one in enumerate(whole):
            assert without_cached(last[number]) == without_cached(one)


def test_events_of_a_list_of_one_have_its_place(mesh: Any) -> None:
    params = {**GREEDY, "max_new_tokens": 3}
    assert {event["index"] for event in streamed(mesh, "", text=PROMPTS[:1], sampling_params=params)} == {0}
    assert not [event for event in streamed(mesh, "", text=PROMPTS[0], sampling_params=params) if "index" in event]


def test_what_cannot_be_compiled_goes_by_the_name_of_this_body(mesh: Any) -> None:
    status, answer = mesh.post("/generate", {"text": "a", "sampling_params": {"regex": "["}})
    error = answer["error"]
    assert (status, error["param"]) == (400, "sampling_params.regex")
    assert error["message"].startswith("'sampling_params.regex' cannot be compiled")


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """How much was in the cache is a matter of who died."""
    return answer | {"meta_info": answer["meta_info"] | {"cached_tokens": 0}}


def test_what_ended_it(mesh: Any) -> None:
    body: dict[str, Any] = {"text": "Ann has"}
    params = {**GREEDY, "max_new_tokens": 40}
    stop = post(mesh, **body, sampling_params=params)["text"][4:8]
    assert stop
    found = post(mesh, **body, sampling_params={**params, "stop": stop})
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in found["text"]
    own = post(mesh, text="What is 3 + 4?", sampling_params={"temperature": 0})
    assert own["meta_info"]["finish_reason"] == {"type": "stop", "matched": own["output_ids"][-1]}
