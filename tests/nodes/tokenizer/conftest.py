"""A small byte-level tokenizer directory. `templates/` has the constructs of the common chat templates."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café 你好世界 🙂👩‍👩‍👧‍👦",
    "def f(x):\n    return [x]\n",
] * 4


def make_tokenizer(*, add_bos: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], tokenizer.token_to_id(SPECIAL[0]))]
        )
    return tokenizer


@pytest.fixture(scope="session")
def make_directory(tmp_path_factory):
    """A directory with tokenizer.json and tokenizer_config.json; keywords go into the latter."""

    def make(name, *, add_bos=True, **config):
        directory = tmp_path_factory.mktemp(name)
        make_tokenizer(add_bos=add_bos).save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": False,
        } | config
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    return make
