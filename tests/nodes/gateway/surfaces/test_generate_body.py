"""Bodies of /generate as completions, and errors that name their fields."""

from typing import Any

import msgspec
import pytest

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest, name_in
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.surfaces.generate.body import SAMPLING, Shown, read
from nodes.request import StopRules

VALIDATOR = Validator(GatewayConfig(model_name="m", vocab_size=1000, context_length=4096))


def job_of(**fields: Any) -> Job:
    return read(VALIDATOR, msgspec.json.encode(fields), "gen-1")


def test_text_and_sampling() -> None:
    job = job_of(
        text="Hello", rid="mine", stream=True, extra_key="tenant",
        sampling_params={
            "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1,
            "stop": ["x", "y"], "stop_token_ids": [5], "no_stop_trim": True, "ignore_eos": True, "n": 3,
            "sampling_seed": 11, "skip_special_tokens": False, "spaces_between_special_tokens": True, "regex": None,
        },
    )  # fmt: skip
    assert job.prepare.texts == ["Hello"]
    assert (job.client_id, job.stream, job.n, job.seed, job.skip_special_tokens) == ("mine", True, 3, 11, False)
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.min_p) == (0.5, 0.9, 0.1)
    assert job.stop == StopRules(
        max_tokens=7, stop_token_ids=[5], stop=["x", "y"], ignore_eos=True, min_tokens=2, include_stop=True
    )
    assert job.own == Shown()
    assert not job.unknown_fields


def test_ids_of_one_prompt_and_of_several() -> None:
    assert job_of(input_ids=[1, 2, 3]).prepare.token_ids == [[1, 2, 3]]
    job = job_of(input_ids=[[1], [2, 3]])
    assert job.prepare.token_ids == [[1], [2, 3]]
    assert job.stop.max_tokens == 128


def test_logprobs() -> None:
    job = job_of(text="a", return_logprob=True, logprob_start_len=4, top_logprobs_num=2, token_ids_logprob=[7])
    assert job.own == Shown(has_logprobs=True, start=4, top=2, ids=(7,))
    assert job.tokens.reads is not None
    assert (job.tokens.reads.top, job.tokens.reads.ids, job.tokens.prompt_logprobs) == (2, (7,), 2)
    # Of the output alone, and of nothing: numbers that say how much do not ask for it.
    assert job_of(text="a", return_logprob=True).tokens.prompt_reads is None
    assert job_of(text="a", top_logprobs_num=5, logprob_start_len=0).tokens.reads is None


def test_what_routers_write_is_known() -> None:
    written = {"model": None, "log_metrics": True, "no_logs": False, "background": False, "return_bytes": False}
    assert job_of(text="a", **written, return_entropy=False, return_hidden_states=False).unknown_fields == []
    for field in ("background", "return_bytes", "return_entropy"):
        with pytest.raises(BadRequest, match=field) as refused:
            job_of(text="a", **{field: True})
        assert refused.value.param == field


def test_unknown_names_are_counted() -> None:
    assert job_of(text="a", whatever=1, sampling_params={"other": 2}).unknown_fields == [
        "whatever", "sampling_params.other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "text", "invalid_value"),
        ({"text": "a", "input_ids": [1]}, "text", "invalid_value"),
        ({"text": ""}, "text", "empty_prompt"),
        ({"text": 5}, "text", "invalid_value"),
        ({"input_ids": [1000]}, "input_ids", "invalid_value"),
        ({"input_ids": [[1], 2]}, "input_ids", "invalid_value"),
        ({"input_ids": []}, "input_ids", "invalid_value"),
        ({"text": "a", "sampling_params": []}, "sampling_params", "invalid_value"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "invalid_value"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "invalid_value"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex", "unsupported_parameter"),
        ({"text": "a", "sampling_params": {"stop": ["x"] * 17}}, "sampling_params.stop", "invalid_value"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "invalid_value"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [1000]}, "token_ids_logprob", "invalid_value"),
        (
            {"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0},
            "logprob_start_len",
            "invalid_value",
        ),
        ({"text": "a", "lora_path": "x"}, "lora_path", "unsupported_parameter"),
        ({"text": "a", "image_data": "x"}, "image_data", "unsupported_parameter"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        job_of(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    name = param.split(".")[0]
    assert name in refused.value.message
    assert not any(f"'{theirs}'" in refused.value.message for name, theirs in SAMPLING.items() if name != theirs)


@pytest.mark.parametrize(("field", "value"), [("regex", "["), ("ebnf", "root ::="), ("json_schema", '{"type": 5}')])
def test_what_is_tried_out_later_goes_by_its_name_here(field: str, value: str) -> None:
    job = job_of(text="a", sampling_params={field: value})
    (grammar,) = job.asks
    assert name_in(job.names, grammar.field or "") == f"sampling_params.{field}"
    (checked,) = job.prepare.checks
    assert grammar.field.encode() in checked.value


@pytest.mark.parametrize(
    ("prompts", "is_list"),
    [({"text": "a"}, False), ({"text": ["a"]}, True), ({"input_ids": [3]}, False), ({"input_ids": [[3]]}, True)],
)
@pytest.mark.parametrize("logprob", [False, True])
def test_a_list_of_one_is_a_list(prompts: dict[str, Any], is_list: bool, logprob: bool) -> None:
    assert job_of(**prompts, return_logprob=logprob).own.is_list == is_list
