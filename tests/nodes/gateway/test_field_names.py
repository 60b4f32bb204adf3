"""Errors of each surface name its own fields, whatever a body is made into on its way."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.context_length import over_context
from nodes.gateway.errors import ApiError, error_from
from nodes.gateway.jobs.fan_out import max_tokens_of
from nodes.gateway.jobs.validation import Job
from nodes.gateway.requests.events import Failure
from nodes.gateway.surfaces.generate import body as generate
from nodes.gateway.surfaces.messages.errors import ANTHROPIC_ERRORS
from tests.nodes.gateway.test_schemas import (
    CONFIG,
    FIELDS,
    NEEDED,
    READERS,
    SCALARS,
    SCHEMAS,
    VALIDATOR,
    VALUES,
    bodies,
)

OF_PARAMS = st.dictionaries(st.sampled_from(sorted(generate.SAMPLING)), VALUES | SCALARS, max_size=3)
OF_GENERATE = st.fixed_dictionaries(
    {},
    optional={name: FIELDS.get(name, VALUES) | SCALARS for name in SCHEMAS["GenerateBody"]["properties"]}
    | {"sampling_params": OF_PARAMS},
)
SURFACES: dict[str, tuple[Any, st.SearchStrategy[dict[str, Any]]]] = {
    name: (reader, bodies(name)) for name, reader in READERS.items()
} | {
    "GenerateBody": (
        lambda data: generate.read(VALIDATOR, data, "g"),
        st.builds(lambda needed, body: {**needed, **body}, st.sampled_from([{"text": "a"}, {}]), OF_GENERATE),
    )
}
EVERY_FIELD = frozenset(field for name in SURFACES for field in SCHEMAS[name]["properties"]) - {*CONFIG.served_names}
QUOTED = re.compile(r"'([a-z_]\w*)(?:\.\w+)*'")


def texts_in(value: Any) -> set[str]:
    """All strings of a body, its own names too."""
    if isinstance(value, dict):
        return {*value, *(text for one in value.values() for text in texts_in(one))}
    if isinstance(value, list):
        return {text for one in value for text in texts_in(one)}
    return {value} if isinstance(value, str) else set()


def strangers(name: str, body: dict[str, Any], error: ApiError) -> set[str]:
    """Names of fields that the error says, and that neither the surface nor the body has."""
    message = error.message
    said = {QUOTED.sub(r"\1", f"'{error.param}'")} if error.param else set[str]()
    if name in ("MessagesBody", "CountTokensBody"):
        # They have no other place for the name.
        message, said = json.loads(ANTHROPIC_ERRORS.body(error, "r"))["error"]["message"], set()
    said |= {found for found in QUOTED.findall(message) if found in EVERY_FIELD}
    return said - {*SCHEMAS[name]["properties"], *texts_in(body)}


def refusal(name: str, body: dict[str, Any]) -> ApiError | None:
    """With the shortest of prompts, and with one that is too long."""
    job: Any = None
    try:
        job = SURFACES[name][0](json.dumps(body).encode())
        for num_tokens in (1, 0, 99, 1000):
            if isinstance(job, Job):
                max_tokens_of(job, num_tokens, CONFIG)
    except ApiError as error:
        if isinstance(job, Job):
            error.rename(job.names)
        return error
    return None


@pytest.mark.parametrize("name", SURFACES)
@settings(max_examples=400)
@given(data=st.data())
def test_errors_name_fields_that_the_surface_has(name: str, data: st.DataObject) -> None:
    body = data.draw(SURFACES[name][1])
    error = refusal(name, body)
    assert error is None or not strangers(name, body, error), (error.message, error.param)


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("wrong", [None, "", [], {}, -1, 0, 1.5, 2**40, True, "x" * 300, [None], [[]], {"x": 1}])
def test_every_field_of_every_surface_with_a_wrong_value(name: str, wrong: Any) -> None:
    needed = NEEDED.get(name, {"text": "a"})
    fields = [(field, wrong) for field in SCHEMAS[name]["properties"]]
    if name == "GenerateBody":
        fields += [("sampling_params", {field: wrong}) for field in generate.SAMPLING]
    for field, value in fields:
        body = {**needed, field: value}
        if (error := refusal(name, body)) is not None:
            assert not strangers(name, body, error), (field, error.message, error.param)


@pytest.mark.parametrize(
    ("name", "body", "own"),
    [
        ("ResponsesBody", {"input": []}, "input"),
        ("ResponsesBody", {"input": "a"}, "input"),
        ("ChatCompletionBody", {"messages": [{"role": "user", "content": ""}]}, "messages"),
        ("CompletionBody", {"prompt": "a"}, "prompt"),
        ("GenerateBody", {"text": "a"}, "text"),
        ("GenerateBody", {"input_ids": [1]}, "input_ids"),
    ],
)
@pytest.mark.parametrize("role_s", ["prompt", "messages"])
def test_what_roles_say_of_a_prompt_names_the_field_that_has_it(name: str, body: Any, own: str, role_s: str) -> None:
    job = SURFACES[name][0](json.dumps(body).encode())
    said = [
        ("empty_prompt", f"{role_s} has no tokens. Give at least one."),
        ("context_length_exceeded", over_context(10, role_s, 20)),
        ("template_error", f"{role_s} is not JSON: x"),
    ]
    for code, message in said:
        failure = Failure(code, message, False, role_s)
        error = error_from(failure, retry_after_s=1, default_param=job.prompt_param)
        error.rename(job.names)
        assert (error.status, error.param) == (400, own)
        assert re.search(rf"\b{own}\b", error.message)
        assert own == role_s or not re.search(rf"\b{role_s}\b", error.message)


def test_what_a_tokenizer_says_later_of_a_grammar_names_the_field_that_has_it() -> None:
    body = {"text": "a", "sampling_params": {"regex": "a+"}}
    job = SURFACES["GenerateBody"][0](json.dumps(body).encode())
    failure = Failure("invalid_value", "'regex' is too complex: compiling it takes too long.", False, "regex")
    error = error_from(failure, retry_after_s=1, default_param=job.prompt_param)
    error.rename(job.names)
    assert (error.param, error.message[:24]) == ("sampling_params.regex", "'sampling_params.regex' ")
