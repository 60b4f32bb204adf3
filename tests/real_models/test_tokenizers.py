"""Published tokenizers and chat templates: ids, texts, streams and prompts are those of transformers."""

import random
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nodes.detokenizer.incremental import DecoderFactory
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.models.spec import ModelSpec
from nodes.tokenizer.errors import PrepareError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from nodes.tokenizer.texts.encoding import TextEncoder, load_encoder
from tests.real_models.folders import folder_of, spec_of
from tests.real_models.texts import CHATS, TOKENIZED

pytestmark = [
    pytest.mark.real_models,
    pytest.mark.timeout(300),
    # What transformers thinks of a folder that a class of its own does not fit is not under test.
    pytest.mark.filterwarnings("ignore"),
]

FAMILIES = ("qwen3", "llama3_1", "gemma3", "llama2", "deepseek_v3", "gptoss", "mistral_nemo")
WITHOUT_TEMPLATE = ("llama2", "gptoss")
ADDED = "every token that was added"
NOT_AS_AUTO = {
    # tokenizer.json prepends a space to each stretch of text. The LlamaTokenizer that transformers 5 makes from the
    # vocabulary does not where a stretch begins with a space. kvmesh uses tokenizer.json as it is.
    "llama2": ("leading space", "leading whitespace", "only spaces", "special tokens"),
    # The class GemmaTokenizer calls <mask> special, which no file of the folder does.
    "gemma3": (ADDED,),
}
"""Texts for which the class that AutoTokenizer chooses differs from the files. The reference for these families is
`PreTrainedTokenizerFast`, which takes tokenizer.json as it is; that no other text differs is tested."""


@dataclass(frozen=True)
class Loaded:
    """One folder, as transformers and as kvmesh have it."""

    family: str
    auto: Any
    reference: Any
    spec: ModelSpec
    encoder: TextEncoder
    factory: DecoderFactory


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Module-scoped, so that one tokenizer is in memory at a time."""
    family = request.param
    folder = folder_of(f"tokenizers/{family}")
    auto = AutoTokenizer.from_pretrained(folder)
    spec = spec_of(folder, tmp_path_factory.mktemp(family))
    reference = PreTrainedTokenizerFast.from_pretrained(folder) if family in NOT_AS_AUTO else auto
    return Loaded(family, auto, reference, spec, load_encoder(spec), DecoderFactory(load_tokenizer(spec)))


def test_bytes_of_every_token(loaded: Loaded) -> None:
    """Each beside another token, as at the beginning of a text some decoders take a space away."""
    tokenizer = load_tokenizer(loaded.spec)
    message, (offsets, data) = loaded.encoder.vocabulary
    ends = struct.unpack(f"<{message.num_tokens + 1}I", offsets)
    table = [data[begin:end] for begin, end in pairwise(ends)]
    anchor = loaded.encoder.encode("a", add_special_tokens=False)[-1]
    before = tokenizer.decode([anchor])
    texts = tokenizer.decode_batch([[anchor, token_id] for token_id in range(len(table))], skip_special_tokens=False)
    wrong = [n for n, text in enumerate(texts) if text != before + table[n].decode(errors="replace")]
    assert not wrong, [(n, tokenizer.id_to_token(n), table[n], texts[n]) for n in wrong[:10]]


@pytest.mark.parametrize("name", TOKENIZED)
def test_texts_are_the_bytes_of_their_tokens(loaded: Loaded, name: str) -> None:
    _, (offsets, data) = loaded.encoder.vocabulary
    ids = loaded.reference(TOKENIZED[name], add_special_tokens=False)["input_ids"]
    ends = [struct.unpack_from("<II", offsets, 4 * token_id) for token_id in ids]
    text = b"".join(data[begin:end] for begin, end in ends).decode()
    assert loaded.reference.decode(ids, skip_special_tokens=False) in (text, text.removeprefix(" "))


def streamed(loaded: Loaded, ids: list[int], *, skip: bool) -> str:
    """What a client that streams is given, all together."""
    decoder = loaded.factory.decoder(skip)
    pieces = [decoder.push(token_id) for token_id in ids]
    return "".join([*pieces, decoder.flush()])


@pytest.mark.parametrize("name", [*TOKENIZED, ADDED])
def test_ids_and_texts(loaded: Loaded, name: str) -> None:
    reference, auto = loaded.reference, loaded.auto
    added = map(str, reference.added_tokens_decoder.values())
    text = "a".join(added) if name == ADDED else TOKENIZED[name]
    as_auto = True
    for special in (True, False):
        ids = reference(text, add_special_tokens=special)["input_ids"]
        assert loaded.encoder.encode(text, add_special_tokens=special) == ids
        as_auto &= auto(text, add_special_tokens=special)["input_ids"] == ids
        for skip in (True, False):
            whole = reference.decode(ids, skip_special_tokens=skip)
            assert loaded.encoder.decode(ids, skip_special_tokens=skip) == whole
            assert streamed(loaded, ids, skip=skip) == whole
            as_auto &= auto.decode(ids, skip_special_tokens=skip) == whole
    assert as_auto == (name not in NOT_AS_AUTO.get(loaded.family, ()))


def test_streams_of_any_ids(loaded: Loaded) -> None:
    draw = random.Random(loaded.family)
    for number in range(20):
        ids = [draw.randrange(len(loaded.reference)) for _ in range(200)]
        for skip in (True, False):
            assert streamed(loaded, ids, skip=skip) == loaded.reference.decode(ids, skip_special_tokens=skip), number


@pytest.mark.parametrize("prompted", [True, False], ids=["to be answered", "closed"])
@pytest.mark.parametrize("name", CHATS)
def test_prompts_of_chats(loaded: Loaded, name: str, prompted: bool) -> None:
    if loaded.family in WITHOUT_TEMPLATE:
        assert loaded.spec.chat_template is None
        return
    messages, tools = CHATS[name]
    template = ChatTemplate(loaded.spec.chat_template or "", loaded.spec.special_tokens, 1 << 20)

    def rendered(chat: list[dict[str, Any]]) -> str | None:
        request = ChatRequest(
            chat=msgspec.json.encode(chat),
            tools=None if tools is None else msgspec.json.encode(tools),
            add_generation_prompt=prompted,
        )
        try:
            return template.render(request)
        except PrepareError:
            return None

    try:
        expected = loaded.reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompted, tokenize=False
        )
    except Exception:  # noqa: BLE001 - of whatever kind
        expected = None
    assert expected or name not in ("plain", "turns"), "every template knows these"
    assert rendered(messages) == expected
    in_parts = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in messages]
    assert rendered(in_parts) == expected
