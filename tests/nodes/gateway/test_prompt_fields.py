"""What prompts are made of and how much of them is served: `suffix`, `documents`, `verbosity`, truncation."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.routes.openapi import document
from nodes.models.fill_in import KNOWN, FillIn, fill_in_of
from tests.nodes.gateway import test_schemas as schemas
from tests.nodes.gateway.fake_ring import Ring

CONFIG = GatewayConfig(model_name="m", context_length=100, vocab_size=1000)
MARKS = FillIn("<pre>", "<suf>", "<mid>")
ABLE = msgspec.structs.replace(CONFIG, fill_in=MARKS, template_reads=("documents", "verbosity"))
USER = [{"role": "user", "content": "hi"}]


def text(config: GatewayConfig = CONFIG, **fields: Any) -> Job:
    return Validator(config).text(json.dumps({"prompt": "hi"} | fields).encode(), "cmpl-1")


def chat(config: GatewayConfig = CONFIG, **fields: Any) -> Job:
    return Validator(config).chat(json.dumps({"messages": USER} | fields).encode(), "chatcmpl-1")


def refused(make: Any, *args: Any, **fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(BadRequest) as caught:
        make(*args, **fields)
    return caught.value.param, caught.value.code


def variables(job: Job) -> Any:
    return json.loads(job.prepare.chat_template_kwargs or b"{}")


def test_a_prompt_is_cut_to_so_many_tokens_at_either_end() -> None:
    for make in (text, chat):
        assert make(truncation_side="right").prepare.truncate_to == 0
        last, first = make(truncate_prompt_tokens=7), make(truncate_prompt_tokens=7, truncation_side="right")
        assert (last.prepare.truncate_to, last.prepare.truncate_end) == (7, False)
        assert (first.prepare.truncate_to, first.prepare.truncate_end) == (7, True)
        assert make(truncate_prompt_tokens=-1, max_tokens=30).prepare.truncate_to == 70
        assert make(truncate_prompt_tokens=-1, max_tokens=200).prepare.truncate_to == 1
        assert make(truncate_prompt_tokens=-1, max_tokens=30, min_tokens=30).prepare.truncate_to == 70
        for wrong in (0, -2, 2**31, "7", 1.5):
            assert refused(make, truncate_prompt_tokens=wrong)[0] == "truncate_prompt_tokens"
        assert refused(make, truncate_prompt_tokens=7, truncation_side="middle")[0] == "truncation_side"
    # What a completion may write by default, and the one token that an answer has at least.
    assert text(truncate_prompt_tokens=-1).prepare.truncate_to == 84
    assert chat(truncate_prompt_tokens=-1).prepare.truncate_to == 99


def test_a_chat_has_the_tokenizers_own_special_tokens_only_if_it_asks() -> None:
    assert not chat().prepare.chat_special_tokens
    assert chat(add_special_tokens=True).prepare.chat_special_tokens
    prepare, _ = Validator(CONFIG).tokenize(json.dumps({"messages": USER, "add_special_tokens": True}).encode(), "r")
    assert prepare.chat_special_tokens


def test_a_suffix_makes_one_text_with_a_gap() -> None:
    assert text(ABLE, suffix="there").prepare.texts == ["<pre>hi<suf>there<mid>"]
    assert text(ABLE, suffix="c", prompt=["a", "b"]).prepare.texts == ["<pre>a<suf>c<mid>", "<pre>b<suf>c<mid>"]
    for nothing in ("", None):
        assert text(suffix=nothing).prepare.texts == text(ABLE, suffix=nothing).prepare.texts == ["hi"]
    assert refused(text, suffix="there") == ("suffix", "unsupported_parameter")
    assert refused(text, ABLE, suffix="there", prompt=[1, 2]) == ("prompt", "invalid_value")
    assert refused(text, ABLE, suffix="there", echo=True) == ("echo", "invalid_value")
    assert refused(text, ABLE, suffix=7)[0] == "suffix"


@pytest.mark.parametrize("marks", KNOWN, ids=lambda marks: marks.before)
def test_the_vocabulary_says_how_a_model_is_asked_for_a_middle(marks: FillIn) -> None:
    tokens = {marks.before, marks.between, marks.after} - {""}
    assert fill_in_of(tokens.__contains__) == marks
    for one in tokens:
        assert fill_in_of((tokens - {one}).__contains__) is None
    said = marks.text("one", "two")
    assert sorted(said.replace("one", "").replace("two", "")) == sorted("".join(tokens))
    assert marks.before + "one" in said
    assert marks.between + "two" in said
    assert said.endswith("one" if marks.suffix_first else marks.after)


def test_what_a_template_reads_is_among_its_variables() -> None:
    documents = [{"title": "a", "text": "b"}]
    job = chat(ABLE, documents=documents, verbosity="low", chat_template_kwargs={"x": 1, "verbosity": "high"})
    assert variables(job) == {"x": 1, "documents": documents, "verbosity": "high"}
    assert variables(chat(ABLE, documents=[], chat_template_kwargs={"documents": documents})) == {
        "documents": documents
    }
    assert chat(documents=[], verbosity=None).prepare.chat_template_kwargs is None
    assert variables(chat(verbosity="medium")) == {"verbosity": "medium"}
    assert refused(chat, documents=documents) == ("documents", "unsupported_parameter")
    assert refused(chat, verbosity="low") == ("verbosity", "unsupported_parameter")
    assert refused(chat, ABLE, verbosity="loud")[0] == "verbosity"
    assert refused(chat, ABLE, documents=["a"])[0] == "documents.0"


def test_the_document_allows_what_a_model_that_can_do_all_of_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(schemas.CONFIG, fill_in=MARKS, template_reads=("documents", "verbosity"))
    components = json.loads(document("1", config))["components"]["schemas"]
    monkeypatch.setattr(schemas, "SCHEMAS", components)
    validator = Validator(config)

    def is_served(read: Any, body: dict[str, Any]) -> bool:
        try:
            read(json.dumps(body).encode(), "r")
        except ApiError:
            return False
        return True

    cases: dict[str, list[Any]] = {
        "suffix": ["", "x", None, 1], "echo": [True, False], "prompt": ["a", ["a", "b"], [1], [[1]]],
        "documents": [[], [{}], [{"a": [1]}], ["a"], None], "verbosity": ["low", "medium", "x", None],
        "truncate_prompt_tokens": [-2, -1, 0, 1, 2**31 - 1, 2**31, None], "truncation_side": ["left", "right", "x"],
    }  # fmt: skip
    for name, read in (("CompletionBody", validator.text), ("ChatCompletionBody", validator.chat)):
        fields = [field for field in cases if field in components[name]["properties"]]
        for first in fields:
            for second in fields:
                for one in cases[first]:
                    for other in cases[second]:
                        body = {**schemas.NEEDED[name], first: one, second: other}
                        assert schemas.allows({"$ref": f"#/{name}"}, body) or not is_served(read, body), body


async def test_prompts_that_are_cut_show_what_is_left_of_them(ring: Ring, client: httpx.AsyncClient) -> None:
    body = {"prompt": "one two", "echo": True, "max_tokens": 1, "truncate_prompt_tokens": 3}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == ("twot", 3)
