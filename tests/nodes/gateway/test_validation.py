"""Bodies to jobs, and every way in which a body can be wrong."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.asks import AskLimits, RowReads, read_asks
from nodes.asks.logit_bias import LogitBias
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest, UnknownModel
from nodes.gateway.fields.cache_scope import scope_of
from nodes.gateway.fields.openai_types import CHAT_BODY, COMPLETION_BODY
from nodes.gateway.fields.unsupported import IGNORED, NEUTRAL_VALUES
from nodes.gateway.jobs.validation import Job, TokenFields, Validator
from nodes.models.pooling import Pooling
from nodes.request import VECTORS, SamplingDefaults

CONFIG = GatewayConfig(
    model_name="m", context_length=100, vocab_size=1000, max_samples_per_call=8, max_prompts_per_call=4
)
VALIDATOR = Validator(CONFIG)
USER = [{"role": "user", "content": "hi"}]


def text(**fields: Any) -> Job:
    return VALIDATOR.text(json.dumps({"prompt": "hi"} | fields).encode(), "cmpl-1")


def chat(**fields: Any) -> Job:
    return VALIDATOR.chat(json.dumps({"messages": USER} | fields).encode(), "chatcmpl-1")


def test_defaults() -> None:
    job = text()
    assert job.prepare.texts == ["hi"]
    assert job.prepare.token_ids is None
    assert job.prepare.chat is None
    assert job.prepare.route
    assert (job.n, job.stream, job.seed) == (1, False, None)
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k, job.sampling.min_p) == (1, 1, 0, 0)
    assert (job.stop.max_tokens, job.stop.stop, job.stop.ignore_eos) == (0, [], False)
    assert job.skip_special_tokens
    assert job.unknown_fields == []


@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b'{"messages": [{"role": "user", "content": "x"}]}'])
def test_a_body_that_says_nothing_of_its_draws_asks_what_one_without_fields_does(body: bytes) -> None:
    kind = COMPLETION_BODY if b"prompt" in body else CHAT_BODY
    for penalty in (1.0, 1.1):
        config = msgspec.structs.replace(CONFIG, sampling_defaults=SamplingDefaults(repetition_penalty=penalty))
        job = (Validator(config).text if b"prompt" in body else Validator(config).chat)(body, "r")
        limits = AskLimits(config.vocab_size, config.sampling_defaults, config.logprobs_of)
        assert list(job.asks) == read_asks(msgspec.structs.asdict(msgspec.json.decode(body, type=kind)), limits)
        assert len(job.asks) == (penalty > 1)


def test_everything_set() -> None:
    job = text(
        model="m", n=2, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_tokens=9, min_tokens=3, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, stop="x",
        stop_token_ids=[5], include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False,
        add_special_tokens=False, logit_bias={"7": -100, "8": 2.5}, priority=-3, cache_salt="s", user="u",
    )  # fmt: skip
    assert (job.n, job.stream, job.include_usage, job.continuous_usage) == (2, True, True, True)
    assert (job.stop.max_tokens, job.stop.min_tokens, job.stop.stop, job.stop.stop_token_ids) == (9, 3, ["x"], [5])
    assert job.stop.include_stop
    assert job.stop.ignore_eos
    assert LogitBias({7: -100, 8: 2.5}) in job.asks
    assert job.sampling.top_k == 0
    assert job.seed == 2**63 - 1
    assert job.prepare.extra_key == scope_of("s", None)
    assert not job.prepare.add_special_tokens
    assert not job.skip_special_tokens
    assert job.priority == -3


def test_null_is_as_if_it_were_not_there() -> None:
    fields = ("n", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias", "user", "logprobs")
    assert text(**dict.fromkeys(fields)) == text()


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    job = chat(max_tokens=5, max_completion_tokens=6)
    assert (job.stop.max_tokens, job.max_tokens_param) == (6, "max_completion_tokens")
    assert chat(max_tokens=5).max_tokens_param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, texts: Any, token_ids: Any) -> None:
    prepare = text(prompt=prompt).prepare
    assert (prepare.texts, prepare.token_ids) == (texts, token_ids)


def test_messages_reach_the_tokenizer_as_they_are() -> None:
    messages = '[{"role":"user","content":[{"type":"text","text":"a"}],"name":"x"}, {"role": "tester","content":"é"}]'
    body = f'{{"messages": {messages}, "chat_template_kwargs": {{"think": [1]}}, "add_generation_prompt": false}}'
    prepare = VALIDATOR.chat(body.encode(), "chatcmpl-1").prepare
    assert (prepare.chat, prepare.chat_template_kwargs) == (messages.encode(), b'{"think":[1]}')
    assert prepare.add_generation_prompt is False
    assert prepare.continue_final_message is False


def test_continuing_the_last_message_adds_no_generation_prompt() -> None:
    prepare = chat(continue_final_message=True).prepare
    assert (prepare.continue_final_message, prepare.add_generation_prompt) == (True, False)


def refused(function: Any, *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        function(*args, **fields)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a"} x',
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xef\xbb\xbf",
        b'{"prompt": "\xff"}',
        b'{"x": "\xff", "prompt": "a"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' * 100_000,
        b'{"tools": ' + b"[" * 5000 + b"]" * 5000 + b', "prompt": "a"}',
    ],
)
def test_what_is_no_json(body: bytes) -> None:
    error = refused(VALIDATOR.text, body, "cmpl-1")
    assert isinstance(error, BadRequest)
    assert error.status == 400
    assert error.param is None
    assert error.code in ("invalid_json", "invalid_utf8")


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_an_empty_body_is_called_empty(body: bytes) -> None:
    error = refused(VALIDATOR.text, body, "cmpl-1")
    assert (error.message, error.code) == ("The body is empty; send a JSON object.", "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null", b"[" * 100_000])
def test_what_is_no_object(body: bytes) -> None:
    assert refused(VALIDATOR.text, body, "cmpl-1").status == 400


WRONG: dict[str, list[Any]] = {
    "model": [5],
    "n": [0, 129, 1.5, True, 10**30, 10**400],
    "stream": ["yes"],
    "stream_options": [[]],
    "max_tokens": [0, -1, "many", 2**31],
    "min_tokens": [-1],
    "temperature": [-0.1, 2.1, "hot", float("inf")],
    "top_p": [-0.1, 1.01],
    "top_k": [-2],
    "min_p": [-1, 1.1],
    "seed": ["x", 2**63],
    "stop": [5, [""], ["x"] * 17, "x" * 257, [1]],
    "stop_token_ids": [[-1], [1000], [1] * 65],
    "logit_bias": [{"5": 101}, {"zebra": 1}, {"-5": 1}, {"1_0": 1}, {"05": 1}, {"²": 1}, {"": 1}, {"5": "x"},
        {"9999999999": 1}, {"1000": 1}, {str(i): 1 for i in range(1025)}, []],
    "priority": [2**40],
    "cache_salt": [""],
    "extra_key": ["", ["a"]],
    "user": ["x" * 2000],
    "prompt": [None, 5, {"a": 1}, [], "", ["a", ""], [-1], [2**40], [1000], [[1000]], [[]], [1, "a"], [[1], 1],
        [[["a"]]], ["a"] * 5, [[1]] * 5, [None], [True]],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_wrong_values_name_the_parameter(field: str, value: Any) -> None:
    body = json.dumps({"prompt": "hi"} | {field: value}).replace("Infinity", "1e999").encode()
    error = refused(VALIDATOR.text, body, "cmpl-1")
    assert error.status == 400
    assert error.param is not None
    assert error.param.partition(".")[0] == field
    assert field in error.message
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": 5, "content": "x"}], "messages.0.role"),
        ([{"role": "", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([*USER, {"role": "user", "content": None}], "messages.1.content"),
        ([*USER, {"role": "assistant", "reasoning": None, "thinking": {}}], "messages.1.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "refusal", "text": "x"}]}], "messages.0.content.0.refusal"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ],
)
def test_wrong_messages_name_the_place(messages: Any, param: str) -> None:
    error = refused(VALIDATOR.chat, json.dumps({"messages": messages}).encode(), "c")
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_an_answer_may_be_reasoning_alone(name: str) -> None:
    """An agent that was stopped amid it sends it back; refused, its conversation could not go on."""
    messages = [*USER, {"role": "assistant", "content": None, name: "hm"}, *USER]
    VALIDATOR.chat(json.dumps({"messages": messages}).encode(), "c")


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "said",
    [{"tool_calls": []}, {"refusal": "no"}, {"function_call": {"name": "f"}}, {"tool_calls": [CALL], "content": ""}],
)
def test_messages_may_be_calls_or_refusals_without_content(said: dict[str, Any]) -> None:
    assert chat(messages=[*USER, {"role": "assistant", "content": None} | said])
    assert chat(messages=[*USER, {"role": "assistant"} | said])


def test_empty_stops_are_none() -> None:
    assert text(stop="").stop == text(stop=[]).stop == text().stop
    assert text(stop_token_ids=[]).stop == text().stop
    assert text(logit_bias={}).asks == text().asks


def test_a_nucleus_of_nothing_is_greedy() -> None:
    assert text(top_p=0, temperature=1.5).sampling.is_greedy
    assert text(temperature=1e-50).sampling.is_greedy
    assert not text(top_p=1e-9).sampling.is_greedy


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_at_all_is_said_to_be_too_few(field: str) -> None:
    error = refused(text, **{field: 0})
    assert error.param == field
    assert "at least one token" in error.message


@pytest.mark.parametrize(
    ("text_of_prompt", "named"),
    [
        ("\\ud800", "\\ud800"),
        ("a\\uDC00x", "\\uDC00"),
        ("\\ud800\\u0041", "\\ud800"),
        ("\\ud83d\\ude00\\udbff and more of it", "\\udbff"),
    ],
)
def test_a_lone_surrogate_is_named(text_of_prompt: str, named: str) -> None:
    body = f'{{"prompt": "{text_of_prompt}"}}'.encode()
    error = refused(VALIDATOR.text, body, "c")
    assert (error.status, error.code) == (400, "invalid_json")
    assert f"lone surrogate {named} at byte {body.index(named.encode())}" in error.message
    paired = VALIDATOR.text(b'{"prompt": "\\ud83d\\ude00"}', "c").prepare.texts
    assert paired == ["\U0001f600"]
    assert "surrogate" not in refused(VALIDATOR.text, b'{"prompt": "\\ud83d\\ude00', "c").message


def test_padding_of_streams_that_is_not_there_is_refused() -> None:
    options = {"include_obfuscation": True}
    assert refused(text, stream=True, stream_options=options).param == "stream_options.include_obfuscation"
    assert text(stream=True, stream_options={"include_obfuscation": False}).stream


def test_missing_parameters_are_named() -> None:
    assert refused(VALIDATOR.chat, b"{}", "c").param == "messages"
    assert refused(VALIDATOR.text, b"{}", "c").param == "prompt"
    assert refused(VALIDATOR.text, b"{}", "c").code == "missing_required_parameter"


def test_values_that_contradict_each_other() -> None:
    assert refused(text, min_tokens=5, max_tokens=4).param == "min_tokens"
    assert refused(text, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(text, n=5, prompt=["a", "b"]).param == "n"
    assert refused(chat, continue_final_message=True, add_generation_prompt=True).param == "continue_final_message"


def test_a_model_that_a_router_does_not_know_is_none() -> None:
    assert text(model="unknown").prepare == text().prepare


def test_an_unknown_model() -> None:
    error = refused(text, model="gpt-99")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def test_every_served_name_is_the_model_and_no_other() -> None:
    validator = Validator(msgspec.structs.replace(CONFIG, aliases=("gpt-4o", "org/m")))
    for name in ("m", "gpt-4o", "org/m"):
        assert validator.text(json.dumps({"prompt": "hi", "model": name}).encode(), "cmpl-1").prepare.texts
    with pytest.raises(UnknownModel, match=r"'gpt'.*'m', 'gpt-4o', 'org/m'"):
        validator.text(b'{"prompt": "hi", "model": "gpt"}', "cmpl-1")


def test_the_models_sampling_defaults_give_way_to_the_requests_own() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    validator = Validator(msgspec.structs.replace(CONFIG, sampling_defaults=defaults))

    def sampled(**fields: Any) -> tuple[float, float, int, float, float]:
        job = validator.text(json.dumps({"prompt": "hi"} | fields).encode(), "cmpl-1")
        found, penalties = job.sampling, [ask.penalty for ask in job.asks]
        return found.temperature, found.top_p, found.top_k, found.min_p, *(penalties or [1.0])

    assert sampled() == sampled(temperature=None, top_k=None) == (0.6, 0.95, 20, 0.1, 1.1)
    assert sampled(temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1) == (0.0, 1.0, 0, 0.0, 1.0)
    assert sampled(top_k=0)[2] == 0, "off is a word of its own"
    assert sampled(top_p=0.5) == (0.6, 0.5, 20, 0.1, 1.1)
    for value in (0, 0.001, 10.5, "1"):
        assert refused(text, repetition_penalty=value).param == "repetition_penalty"


@pytest.mark.parametrize("field", sorted(NEUTRAL_VALUES))
def test_known_and_unsupported_fields(field: str) -> None:
    ask = chat if field in ("add_special_tokens", "echo") else text
    error = refused(ask, **{field: {"some": "thing"}})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    for value in (None, *NEUTRAL_VALUES[field]):
        assert ask(**{field: value}).unknown_fields == []


UNSERVED: dict[str, list[Any]] = {
    "top_logprobs": [5],
    "best_of": [2, True],
    "suffix": ["x"],
    "guided_decoding_backend": ["xgrammar"],
    "modalities": [["text", "audio"]],
    "session_id": ["s"],
    "session_params": [{"id": "s"}],
    "bootstrap_room": [7],
    "custom_params": [{"a": 1}],
    "vllm_xargs": [{"a": 1}],
    "thinking_token_budget": [5],
    "return_meta_info": [True],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in UNSERVED for value in UNSERVED[field]])
def test_values_that_would_change_the_answer(field: str, value: Any) -> None:
    assert refused(text, **{field: value}).param == field


def test_what_describes_the_output_is_checked_by_a_tokenizer_and_ends_it() -> None:
    job = text(regex="a+", ignore_eos=True, min_tokens=3)
    assert job.prepare.asks == ["min_tokens/1", "grammar/2"]
    assert [one.name for one in job.prepare.checks] == ["grammar/2"]
    # The end that the grammar leaves alone has to end it.
    assert (job.stop.ignore_eos, job.stop.min_tokens) == (False, 3)
    plain = text(ignore_eos=True, response_format={"type": "text"}, min_tokens=3)
    assert (plain.stop.ignore_eos, plain.prepare.checks) == (True, [])
    assert refused(chat, regex="a", guided_choice=["b"]).param == "guided_choice"
    assert refused(chat, response_format={"type": "yaml"}).param == "response_format.type"
    assert refused(chat, response_format={"type": "json_schema"}).param == "response_format.json_schema"
    assert refused(chat, guided_choice=[]).param == "guided_choice"


def test_no_field_is_both_served_and_refused() -> None:
    served = set(CHAT_BODY.__struct_fields__) & set(COMPLETION_BODY.__struct_fields__)
    assert not served & (NEUTRAL_VALUES.keys() | IGNORED)


def test_logprobs_of_chats() -> None:
    assert chat(logprobs=False, top_logprobs=0, logprob_token_ids=[]).tokens == TokenFields()
    assert chat(logprobs=True).tokens == TokenFields(reads=RowReads(0))
    job = chat(logprobs=True, top_logprobs=20, logprob_token_ids=[5, 999])
    assert job.tokens.reads == RowReads(20, (5, 999), "raw")
    assert job.prepare.asks == ["logprobs/1"]
    processed = Validator(msgspec.structs.replace(CONFIG, logprobs_of="processed"))
    body = json.dumps({"messages": USER, "logprobs": True}).encode()
    assert processed.chat(body, "c").tokens.reads == RowReads(0, (), "processed")


def test_logprobs_of_completions() -> None:
    assert text().tokens == text(logprobs=None).tokens == TokenFields()
    assert text(logprobs=0).tokens.reads == RowReads(0)
    assert text(logprobs=20, logprob_token_ids=[7]).tokens.reads == RowReads(20, (7,))


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (chat, {"top_logprobs": 1}, "top_logprobs"),
        (chat, {"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (chat, {"logprobs": 3}, "logprobs"),
        (chat, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (chat, {"logprobs": True, "logprob_token_ids": [1000]}, "logprob_token_ids"),
        (chat, {"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids.0"),
        (chat, {"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        (text, {"logprobs": 21}, "logprobs"),
        (text, {"logprobs": -1}, "logprobs"),
        (text, {"logprobs": True}, "logprobs"),
        (text, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (text, {"logprobs": 1, "logprob_token_ids": [1000]}, "logprob_token_ids"),
        (text, {"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_logprobs_that_cannot_be(kind: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(kind, **fields)
    assert (error.status, error.param) == (400, param)


def test_ids_beside_the_text() -> None:
    assert chat(return_token_ids=True).tokens == TokenFields(ids=True, prompt_ids=True)
    assert text(return_prompt_token_ids=True).tokens == TokenFields(prompt_ids=True)
    assert not text(return_prompt_token_ids=True).tokens.of_output
    assert text(logprobs=1, return_tokens_as_token_ids=True).tokens == TokenFields(RowReads(1), as_ids=True)


def test_unknown_fields_are_reported_and_ignored_ones_are_not() -> None:
    job = text(next_year={"x": [1]}, best_model=1, **dict.fromkeys(IGNORED, "x"))
    assert sorted(job.unknown_fields) == ["best_model", "next_year"]


def test_tokenize() -> None:
    prepare, unknown = VALIDATOR.tokenize(b'{"prompt": "a", "add_special_tokens": false, "zz": 1}', "r")
    assert (prepare.texts, prepare.add_special_tokens, prepare.route, unknown) == (["a"], False, False, ["zz"])
    prepare, _ = VALIDATOR.tokenize(json.dumps({"messages": USER, "chat_template_kwargs": {"a": 1}}).encode(), "r")
    assert prepare.chat == json.dumps(USER).encode()
    assert prepare.chat_template_kwargs == b'{"a": 1}'
    assert prepare.texts is None
    assert refused(VALIDATOR.tokenize, b"{}", "r").param == "prompt"
    assert refused(VALIDATOR.tokenize, json.dumps({"prompt": "a", "messages": USER}).encode(), "r").status == 400
    assert refused(VALIDATOR.tokenize, b'{"prompt": "a", "return_token_strs": true}', "r").param == "return_token_strs"


def test_detokenize() -> None:
    body, unknown = VALIDATOR.detokenize(b'{"tokens": [1, 2], "skip_special_tokens": true}')
    assert (body.tokens, body.skip_special_tokens, unknown) == ([1, 2], True, [])
    assert refused(VALIDATOR.detokenize, b'{"tokens": [1000]}').param == "tokens"
    assert refused(VALIDATOR.detokenize, b'{"tokens": [-1]}').param == "tokens.0"
    assert refused(VALIDATOR.detokenize, b"{}").param == "tokens"


def test_an_unknown_vocabulary_is_not_checked() -> None:
    validator = Validator(GatewayConfig(model_name="m", context_length=100))
    assert validator.text(b'{"prompt": [70000]}', "c").prepare.token_ids == [[70000]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "n", "stop", "logit_bias", "stream_options", "tools", "max_tokens", "seed", "user"]
)


@given(
    st.dictionaries(NAMES | st.text(max_size=5), JSON, max_size=5), st.sampled_from([VALIDATOR.text, VALIDATOR.chat])
)
def test_any_object_is_a_job_or_an_error_of_the_client(body: dict[str, Any], function: Any) -> None:
    refusal: ApiError | None = None
    try:
        function(json.dumps(body, allow_nan=True).encode(), "id")
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in (400, 404)
        assert json.loads(refusal.body())["error"]["message"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_job_or_an_error_of_the_client(data: bytes) -> None:
    with pytest.raises(BadRequest):
        VALIDATOR.chat(data, "id")


def test_asks_are_read_from_a_body_and_named_to_tokenizers() -> None:
    job = chat(presence_penalty=0.5, bad_words=["no"], min_tokens=2)
    assert job.prepare.asks == ["min_tokens/1", "bad_words/1", "penalties/1"]
    assert job.prepare.words == ["no", " no"]
    assert chat(bad_words=["\n"]).prepare.words == ["\n", " \n"]
    assert refused(chat, bad_words=["a", ""]).param == "bad_words.1"
    assert refused(chat, bad_words=["a"] * 10_000).param == "bad_words"
    assert refused(chat, allowed_token_ids=[1000]).param == "allowed_token_ids"
    assert refused(chat, presence_penalty=2.5).param == "presence_penalty"
    assert refused(chat, frequency_penalty=float("nan")).param is None, "JSON has no such number"


def test_a_model_that_makes_no_text_is_not_asked_for_any_and_is_probed_for_a_vector() -> None:
    validator = Validator(
        GatewayConfig(model_name="m", context_length=64, pooling=Pooling(pool="cls"), makes_text=False)
    )
    for read, body in ((validator.text, b'{"prompt": "p"}'), (validator.chat, b'{"messages": []}')):
        with pytest.raises(BadRequest, match=r"makes no text\. It gives embeddings: ask /v1/embeddings, /score"):
            read(body, "r")
    scores = GatewayConfig(
        model_name="m", context_length=64, pooling=Pooling(pool="cls", kind="score"), makes_text=False
    )
    with pytest.raises(BadRequest, match="It gives scores: ask /score, /rerank or /classify"):
        Validator(scores).text(b'{"prompt": "p"}', "r")
    probe = validator.probe(b'{"prompt": "p", "max_tokens": 1}', "r")
    assert (probe.kind, probe.prepare.asks) == ("cls", [VECTORS])
