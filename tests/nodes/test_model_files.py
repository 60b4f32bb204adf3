"""The small files of a model's directory: which of them counts, who names an end token, and what damage is reported."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelDamaged, ModelError, ModelUnsupported, resolve_model
from nodes.model_spec.checkpoint_files import INDEX_FILE, SINGLE_FILE, SMALL_FILES, small_files
from nodes.model_spec.end_tokens import describe_ends, with_vocabulary
from nodes.model_spec.template_files import require_template
from nodes.model_spec.vocabulary import load_tokenizer, vocabulary_facts
from nodes.tokenizer.errors import InvalidTokenId
from nodes.tokenizer.texts.encoding import load_encoder
from tests.nodes.checkpoints import LLAMA, write_model, write_modules

CHATS = [{"role": "user", "content": "hi"}]


def write(directory: Path, **files: Any) -> Path:
    """A small model with these files; names with `__` for a dot, `_in_` for a folder."""
    write_model(directory, LLAMA)
    for key, content in files.items():
        path = directory / key.replace("__", ".").replace("_in_", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "template", "said_by"),
    [
        ({}, None, None),
        ({"tokenizer_config__json": {"chat_template": "C"}}, "C", "tokenizer_config.json"),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, "D", "tokenizer_config.json"),
        ({"tokenizer_config__json": {"chat_template": {"default": "D", "x": "X"}}}, "D", "tokenizer_config.json"),
        (
            {"chat_template__jinja": "J\r\n", "tokenizer_config__json": {"chat_template": "C"}},
            "J\n",
            "chat_template.jinja",
        ),
        ({"chat_template__jinja": "J", "additional_chat_templates_in_rag__jinja": "R"}, "J", "chat_template.jinja"),
        (
            {"chat_template__jinja": "J", "additional_chat_templates_in_default__jinja": "A"},
            "A",
            "additional_chat_templates/default.jinja",
        ),
    ],
)
def test_the_default_template_is_the_one_that_transformers_takes(
    tmp_path: Path, files: dict[str, Any], template: str | None, said_by: str | None
) -> None:
    spec = resolve_model(str(write(tmp_path / "m", **files)))
    require_template(spec)
    assert (spec.chat_template, spec.said_by.get("chat_template")) == (template, said_by)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    if template is not None:
        assert reference.get_chat_template() == template


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"chat_template": NAMED[1:]}},
        # Files of named templates hide the config's own, even if they have no default.
        {"tokenizer_config__json": {"chat_template": "C"}, "additional_chat_templates_in_tool_use__jinja": "T"},
    ],
)
def test_named_templates_without_a_default_are_named(tmp_path: Path, files: dict[str, Any]) -> None:
    spec = resolve_model(str(write(tmp_path / "m", **files)))
    with pytest.raises(ModelUnsupported, match=r"chat templates tool_use, .*--chat-template"):
        require_template(spec)
    with pytest.raises(ValueError, match="no default"):
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "m").get_chat_template()


def test_a_bos_token_of_the_special_tokens_map(tmp_path: Path) -> None:
    bos = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    spec = resolve_model(
        str(write(tmp_path / "m", tokenizer_config__json={}, special_tokens_map__json={"bos_token": bos}))
    )
    assert spec.special_tokens == {"bos_token": "<s>"}
    assert spec.said_by["special_tokens.bos_token"] == "special_tokens_map.json"
    assert load_tokenizer(spec).encode("<s>a").ids == [300, 97]


def test_special_tokens_that_are_to_be_split_are_text(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tokenizer_config__json={"split_special_tokens": True, "eos_token": "<|im_end|>"})
    ids = load_tokenizer(resolve_model(str(directory))).encode("a<|im_end|>").ids
    assert ids == PreTrainedTokenizerFast.from_pretrained(directory)("a<|im_end|>")["input_ids"] == list(b"a<|im_end|>")


def test_blank_lines_around_a_tokenizer_are_no_damage(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(f"\n\n{text}{' ' * 100}\n")
    assert load_tokenizer(resolve_model(str(directory))).encode("a").ids == [97]


def test_a_link_to_nowhere_is_no_missing_file(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).symlink_to(tmp_path / "lost blob")
        with pytest.raises(ModelError, match=name):
            resolve_model(str(directory))
        (directory / name).unlink()


def ends_of(directory: Path) -> Any:
    spec = resolve_model(str(directory))
    return with_vocabulary(spec, vocabulary_facts(spec))


def refusal(directory: Path) -> str:
    """What is said of a model that is refused; "" of one that is served."""
    try:
        ends_of(directory)
    except ModelError as error:
        return error.message
    return ""


def test_whoever_names_an_end_token_is_believed(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "m", generation_config__json={"eos_token_id": [7, 2]},
        tokenizer_config__json={"eos_token": "<|im_end|>"}, chat_template__jinja="x",
    )  # fmt: skip
    spec = ends_of(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    own = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}["<|im_end|>"]
    assert spec.eos_token_ids == (7, 2, own)
    assert describe_ends(spec) == f"7 (generation_config), 2 (generation_config), {own} (tokenizer)"
    (directory / "generation_config.json").unlink()
    assert describe_ends(ends_of(directory)) == f"2 (config), {own} (tokenizer)"
    (directory / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": None}))
    assert ends_of(directory).eos_token_ids == (own,)
    (directory / "tokenizer_config.json").unlink()
    spec = ends_of(directory)
    assert spec.eos_token_ids == ()
    assert "no file of m names an end token" in spec.notes[-1]


def test_an_end_token_that_can_never_be_drawn_is_a_note(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", tokenizer_config__json={"eos_token": "<|new|>"})
    spec = ends_of(directory)
    assert spec.eos_token_ids == (2,)
    assert "has id 300, which the model cannot draw" in spec.notes[0]
    assert "1 tokens more than the model has embeddings" in spec.notes[1]


def test_a_token_without_an_embedding_is_refused_by_its_text(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(301))
    (directory / "added_tokens.json").write_text('{"<extra>": 301}')
    encoder = load_encoder(resolve_model(str(directory)))
    encoder.check_prompt(encoder.encode("plain", add_special_tokens=True), "prompt")
    with pytest.raises(InvalidTokenId, match=r"prompt contains token id 301 \('<extra>'\).*no embedding.*0 to 299"):
        encoder.check_prompt(encoder.encode("a <extra>", add_special_tokens=True), "prompt")


BAD = {
    "empty": "", "cut off": '{"a": ', "list": "[]", "text": '"x"', "not text": "\x00\xff",
    "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "infinite number": '{"eos_token_id": 1e999, "eos_token": 1e999, "added_tokens_decoder": 1e999}',
    "huge number": '{"eos_token_id": ' + "9" * 5000 + "}",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SMALL_FILES if name.endswith(".json")])
def test_a_damaged_file_is_named_at_once(tmp_path: Path, name: str) -> None:
    directory = write_modules(write(tmp_path / "m"), ("Pooling", {"embedding_dimension": 16, "pooling_mode": "mean"}))
    if name == INDEX_FILE:
        (directory / SINGLE_FILE).unlink()
    for how, content in BAD.items():
        (directory / name).write_bytes(content.encode("latin-1"))
        began = time.monotonic()
        if error := refusal(directory):
            assert name in error, how
            assert "ownload" in error or "number" in how, how
        else:
            # Fields that this file does not have are nobody's business.
            assert "number" in how, name
        assert time.monotonic() - began < 5
    # 100 MB that take no room: nobody may read them.
    with (directory / name).open("wb") as stream:
        stream.truncate(100_000_000)
    with pytest.raises(ModelDamaged, match=name.replace(".", r"\.")):
        ends_of(directory)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        ends_of(directory)


@pytest.mark.parametrize(
    ("file", "document", "words"),
    [
        ("tokenizer_config", {"bos_token": 5}, "bos_token should be a token's text"),
        ("tokenizer_config", {"bos_token": {"text": "x"}}, "bos_token should be"),
        ("tokenizer_config", {"bos_token": {"content": "x", "lstrip": "yes"}}, "lstrip of bos_token"),
        ("tokenizer_config", {"extra_special_tokens": "x"}, "should be a list of tokens"),
        ("tokenizer_config", {"additional_special_tokens": [7]}, "should be a token's text"),
        ("tokenizer_config", {"added_tokens_decoder": []}, "should be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<a>"}}}, "is not a token id"),
        ("tokenizer_config", {"added_tokens_decoder": {"5": "<a>", "7": "<a>"}}, "'<a>' as 5 and as 7"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}},
            "has id 5, tokenizer.json says",
        ),
        ("tokenizer_config", {"chat_template": 5}, "chat_template is neither"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "chat_template is neither"),
        ("added_tokens", {"<a>": "5"}, "is not a token id"),
        ("added_tokens", {"<a>": -1}, "is not a token id"),
        ("added_tokens", {"<a>": 400, "<b>": 400}, "one id to several tokens"),
        ("added_tokens", {"<|im_end|>": 5}, "has id 5, tokenizer.json says"),
        ("special_tokens_map", {"eos_token": [1]}, "eos_token should be"),
    ],
)
def test_what_is_wrong_with_tokens_is_said(tmp_path: Path, file: str, document: dict[str, Any], words: str) -> None:
    directory = write(tmp_path / "m", **{f"{file}__json": document})
    with pytest.raises(ModelDamaged, match=words) as caught:
        ends_of(directory)
    assert str(directory) in caught.value.message
    assert f"{file}.json" in caught.value.message


def test_what_a_hub_is_asked_for() -> None:
    names = ["README.md", "config.json", "added_tokens.json", "additional_chat_templates/rag.jinja", "x/config.json"]
    assert small_files(names) == ["config.json", "added_tokens.json", "additional_chat_templates/rag.jinja"]


def test_an_end_token_that_its_tokenizer_does_not_know_is_a_note(tmp_path: Path) -> None:
    spec = resolve_model(str(write(tmp_path / "m", tokenizer_config__json={"eos_token": "<|nowhere|>"})))
    spec = with_vocabulary(spec, replace(vocabulary_facts(spec), eos_token_id=None))
    assert spec.eos_token_ids == (2,)
    assert "eos_token '<|nowhere|>' is no token of its tokenizer, so it ends nothing" in spec.notes[0]
