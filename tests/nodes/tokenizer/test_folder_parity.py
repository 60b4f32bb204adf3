"""Folders of tokenizer files as people publish them, against transformers: same tokens, same ids, same text, both ways.

The oracle is `PreTrainedTokenizerFast`, which takes tokenizer.json as it is. Classes of single models
(`LlamaTokenizer`) rebuild it from its vocabulary alone, which no other server does.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from nodes.model_spec import ModelDamaged, ModelSpec, resolve_model
from nodes.model_spec.checkpoint_files import TOKENIZER_FILE
from nodes.model_spec.directory import read_texts
from nodes.model_spec.token_files import ADDED, SPECIAL_MAP, TOKENIZER_CONFIG
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from tests.nodes.tokenizer.conftest import make_tokenizer

PLAIN = make_tokenizer().to_str()
OWN_IDS = make_tokenizer().get_vocab(with_added_tokens=True)
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
# Special tokens of tokenizer.json, a plain word of it, and texts that it does not have.
TEXTS = ("<|im_end|>", "<|eot_id|>", "Ġfox", "<x>", "<y>", " z ", "<|im_start|>")
CHAT = [
    {"role": "system", "content": "<x> fox "},
    {"role": "user", "content": "a <|im_end|>b<y>"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "你"},
]
SAMPLES = (
    "The quick fox<x>jumps <y> <|im_end|> z  z fox\n",
    "<|eot_id|><|im_start|>ab <x> fox",
    "naïve 你好",
    "<y><x>",
)
# The same in all folders that hypothesis writes; what fails is then printed as those files.
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

text = st.sampled_from(TEXTS)
flags = st.fixed_dictionaries({}, optional=dict.fromkeys(FLAGS, st.booleans()))
typed = st.builds(lambda content, given: {"__type": "AddedToken", "content": content, **given}, text, flags)
# Objects without a type stand in special_tokens_map.json only, mostly without `special`.
untyped = st.builds(lambda content, given: {"content": content, **given}, text, flags)
listed = st.dictionaries(st.integers(343, 352), untyped, max_size=4).map(
    lambda entries: {str(OWN_IDS.get(one["content"], number)): one for number, one in entries.items()}
)
extra = st.one_of(
    st.lists(text | typed, max_size=3), st.dictionaries(st.sampled_from(("boi_token", "x")), text, max_size=2)
)
config_files = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, text | typed | st.none()),
        "additional_special_tokens": st.lists(text | typed, max_size=3),
        "extra_special_tokens": extra,
        "added_tokens_decoder": listed,
        "add_bos_token": st.booleans(),
        "split_special_tokens": st.booleans(),
    },
)
special_maps = st.none() | st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, text | untyped),
        "additional_special_tokens": st.lists(text, max_size=3),
        "extra_special_tokens": extra.filter(lambda one: isinstance(one, dict) or all(isinstance(t, str) for t in one)),
    },
)
added_files = st.none() | st.dictionaries(text, st.integers(343, 352), max_size=3).map(
    lambda entries: {content: OWN_IDS.get(content, number) for content, number in entries.items()}
)
own_tokens = st.lists(
    st.builds(lambda content, given: (content, given), st.sampled_from(("<x>", "<y>", "Ġfox")), flags), max_size=2
)


SHOWN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
MACRO = (
    "{% macro show(m) %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{{ image_token }}\n{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{{ x }}{% endif %}"
)
source = st.sampled_from((SHOWN, MACRO, f"{SHOWN}.", f"{MACRO}."))
PLACES = ("chat_template.jinja", "additional_chat_templates/default.jinja", "additional_chat_templates/rag.jinja")
named_sources = st.dictionaries(st.sampled_from(("default", "tool_use")), source, min_size=1)
config_templates = st.none() | source | named_sources
file_templates = st.dictionaries(st.sampled_from(PLACES), source, max_size=2)


class Folder(msgspec.Struct):
    """The contents of the files; None: no such file."""

    own: list[tuple[str, dict[str, bool]]]
    config: dict[str, Any]
    special_map: dict[str, Any] | None
    added: dict[str, int] | None
    config_template: str | dict[str, str] | None
    file_templates: dict[str, str]

    def write(self, directory: Path) -> Path:
        tokenizer = Tokenizer.from_str(PLAIN)
        tokenizer.add_tokens([AddedToken(content, **given) for content, given in self.own])
        tokenizer.save(str(directory / TOKENIZER_FILE))
        named = {TOKENIZER_CONFIG: self.config | {"tokenizer_class": "PreTrainedTokenizerFast"}}
        if isinstance(self.config_template, dict):
            pairs = self.config_template.items()
            named[TOKENIZER_CONFIG]["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
        elif self.config_template is not None:
            named[TOKENIZER_CONFIG]["chat_template"] = self.config_template
        (directory / PLACES[1]).parent.mkdir(exist_ok=True)
        for place in PLACES:
            (directory / place).unlink(missing_ok=True)
        for place, text in self.file_templates.items():
            (directory / place).write_text(text)
        for name, document in {**named, SPECIAL_MAP: self.special_map, ADDED: self.added}.items():
            path = directory / name
            path.unlink(missing_ok=True)
            if document is not None:
                path.write_text(json.dumps(document))
        return directory


folders = st.builds(
    Folder, own=own_tokens, config=config_files, special_map=special_maps, added=added_files,
    config_template=config_templates, file_templates=file_templates,
)  # fmt: skip


def spec_of(directory: Path) -> ModelSpec:
    tokens, template = read_texts(directory)
    return msgspec.structs.replace(
        resolve_model("echo"), path=str(directory), tokenizer_path=str(directory / TOKENIZER_FILE),
        special_tokens=tokens.named, added_tokens=tokens.added, own_ids_win=tokens.own_ids_win,
        split_special_tokens=tokens.split_special_tokens,
        chat_template=template.source, named_templates=template.named, said_by=tokens.said_by,
    )  # fmt: skip


def is_ambiguous(spec: ModelSpec) -> bool:
    """The exception: a text that only names have, three times or more and with different flags. Which of them
    transformers takes depends on which were strings and which objects; nobody publishes such a thing.
    """
    nameless = [one for one in spec.added_tokens if one.id < 0]
    flags = {text: {one for one in nameless if one.content == text} for text in TEXTS}
    return any(len(flags[text]) > 1 and [one.content for one in nameless].count(text) > 2 for text in TEXTS)


LISTED_UNDER_AN_OWN_ID = Folder(
    own=[("<x>", {})], config={}, special_map={"image_token": {"content": " z ", "single_word": True}},
    added={" z ": 345}, config_template=None, file_templates={},
)  # fmt: skip
"""added_tokens.json gives ` z ` the id that `<x>` has in tokenizer.json; its name is none of the standard ones."""


def compare(directory: Path) -> None:
    try:
        reference = PreTrainedTokenizerFast.from_pretrained(directory)
    except (TypeError, ValueError, AttributeError, KeyError):
        # Nobody can have published such a folder. Here it is served or refused, but never with an error of Python's.
        event("transformers refuses")
        reference = None
    try:
        spec = spec_of(directory)
        ours = load_tokenizer(spec)
    except ModelDamaged as error:
        event("refused")
        refused = error.message
    else:
        refused = ""
    if refused:
        assert any(words in refused for words in ("says that the token", "lists", "should be", "one id")), refused
        assert str(directory) in refused
        return
    if reference is None or is_ambiguous(spec):
        return
    assert spec.special_tokens == reference.special_tokens_map
    assert ours.get_vocab(with_added_tokens=True) == reference.get_vocab()
    for sample in SAMPLES:
        for special in (True, False):
            ids = ours.encode(sample, add_special_tokens=special).ids
            assert ids == reference(sample, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    compare_chats(spec, ours, reference)


def compare_chats(spec: ModelSpec, ours: Tokenizer, reference: Any) -> None:
    try:
        expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    except ValueError:
        # It has no template, or several without a default.
        event("no default" if spec.named_templates else "no template")
        expected = None
    assert (spec.chat_template is None) == (expected is None)
    assert bool(spec.named_templates) == isinstance(reference.chat_template, dict) * (expected is None)
    if expected is not None:
        assert spec.chat_template is not None
        chat = ChatRequest(chat=json.dumps(CHAT).encode())
        text = ChatTemplate(spec.chat_template, spec.special_tokens, max_chars=10_000).render(chat)
        assert ours.encode(text, add_special_tokens=False).ids == expected


# 5000 take 90 s alone, and several times that beside other tests.
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.mark.parametrize("max_examples", [100, pytest.param(5000, marks=SLOW)])
def test_any_folder(tmp_path: Path, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(folders)
    @example(LISTED_UNDER_AN_OWN_ID)
    def check(folder: Folder) -> None:
        compare(folder.write(tmp_path))

    check()
