import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.tiny_model import grammar
from tools.tiny_model import train as train_module
from tools.tiny_model.conversation import Example, Message
from tools.tiny_model.evaluate import PROMISED, Model, score
from tools.tiny_model.grammar import FAMILY_NAMES, held_out_examples, sample, training_examples
from tools.tiny_model.network import Network, Shape
from tools.tiny_model.packing import Batch, Encoder, Packer
from tools.tiny_model.tokenizer import CHAT_TEMPLATE, render, token_id
from tools.tiny_model.train import Settings, load_start, rate_scale, save, train

DIRECTORY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"
CLAIM = 0.95
MARGIN = 0.05


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(DIRECTORY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_the_same_seed_gives_the_same_examples():
    assert [sample(Random(5)) for _ in range(3)] == [sample(Random(5)) for _ in range(3)]
    assert list(islice(training_examples(3), 200)) == list(islice(training_examples(3), 200))
    assert list(islice(training_examples(3), 200)) != list(islice(training_examples(4), 200))


def test_every_family_is_in_the_training_stream():
    seen = Counter(example.family for example in islice(training_examples(0), 5000))
    assert set(seen) == set(FAMILY_NAMES)


def sums(text: str) -> set[tuple[str, int, int]]:
    """The sums and differences that a question asks for, in whatever form."""
    found: set[tuple[str, int, int]] = set()
    for first, sign, second in re.findall(r"(\d+) ?(\+|-|plus|minus) ?(\d+)", text):
        found.add(("add" if sign in {"+", "plus"} else "subtract", int(first), int(second)))
    for first, second in re.findall(r"[Aa]dd (\d+) and (\d+)", text):
        found.add(("add", int(first), int(second)))
    for second, first in re.findall(r"[Ss]ubtract (\d+) from (\d+)", text):
        found.add(("subtract", int(first), int(second)))
    for first, verb, second in re.findall(r"has (\d+) \w+ and (buys|gets|finds|gives away|loses|sells) (\d+)", text):
        found.add(("add" if verb in {"buys", "gets", "finds"} else "subtract", int(first), int(second)))
    return {(kind, min(a, b), max(a, b)) if kind == "add" else (kind, a, b) for kind, a, b in found}


def test_held_out_sums_never_occur_in_training_in_any_turn_or_form():
    held_out: set[tuple[str, int, int]] = set()
    for family in ("add", "subtract", "story"):
        for example in held_out_examples(2, family, 200):
            asked = sums(example.messages[-1].content)
            assert len(asked) == 1
            held_out |= asked
    for example in islice(training_examples(0), 5_000):
        assert not example.held_out
        for message in example.messages:
            if message.role == "user":
                assert not sums(message.content) & held_out


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_held_out_examples_end_in_a_held_out_question(family: str):
    examples = held_out_examples(2, family, 5)
    assert len(set(examples)) == 5
    last = "tool" if family in ("call_result", "call_two_results") else "user"
    assert all(e.held_out and e.family == family and e.messages[-1].role == last for e in examples)


def test_notes_whose_every_entry_is_held_out_have_other_earlier_questions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar, "is_held_out", lambda key: key is not None and key.startswith("notes:"))
    earlier = [m for seed in range(20) for m in sample(Random(seed), "notes").messages[:-1] if m.role == "user"]
    assert earlier


def test_sums_and_json_are_right():
    for example in held_out_examples(3, "add", 50):
        digits = "".join(c if c.isdigit() else " " for c in example.messages[-1].content).split()
        assert sum(map(int, digits)) == int(example.answer)
    for example in held_out_examples(3, "json", 50):
        json.loads(example.answer)


def test_the_directory_holds_less_than_ten_megabytes_of_safetensors():
    file = DIRECTORY / "model.safetensors"
    assert file.stat().st_size < 10_000_000
    config = json.loads((DIRECTORY / "config.json").read_text())
    with safe_open(file, framework="np") as weights:
        names = set(weights.keys())
    assert names == {name for name, _ in Network(Shape()).named_parameters()}
    assert config["num_hidden_layers"] == Shape().num_layers


def test_the_chat_template_renders_as_documented(model: Model, tokenizer: Tokenizer):
    assert (DIRECTORY / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    messages = (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello!"),
        Message("user", "2 + 2"),
    )
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(messages) == expected
    assert model.encode(Example(messages, "4", "add", False)) == tokenizer.encode(expected).ids


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_the_tokenizer_gives_any_text_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_characters_beyond_ascii_are_split_over_tokens(tokenizer: Tokenizer):
    for character in "é你😀":
        assert len(tokenizer.encode(character).ids) == len(character.encode())


def test_digits_stand_alone(tokenizer: Tokenizer):
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


# The weights are a file that no test changes: whether they compute as they did, the samples below say.
@pytest.mark.slow
def test_held_out_answers_are_as_good_as_the_model_card_says(model: Model):
    scores = score(model, 3, seed=11, families=PROMISED)
    right, total = (sum(column) for column in zip(*scores.values(), strict=True))
    assert total >= 36
    assert right / total >= CLAIM - MARGIN


def test_samples_are_what_the_model_answers(model: Model):
    samples = json.loads((DIRECTORY / "samples.json").read_text(encoding="utf-8"))
    assert len(samples) >= 55
    assert {entry["family"] for entry in samples} >= set(PROMISED)
    chosen = [entry for entry in samples if entry["completion_tokens"] < 60][::8]
    examples = [
        Example(tuple(Message(**m) for m in entry["messages"]), entry["answer"], entry["family"], True)
        for entry in chosen
    ]
    assert [g.text for g in model.answer(examples)] == [entry["answer"] for entry in chosen]


def test_only_the_assistants_words_have_a_weight(tokenizer: Tokenizer):
    example = Example(
        (Message("user", "Hi"), Message("assistant", "Hello!"), Message("user", "2 + 2")), "4", "add", False
    )
    document = Encoder(tokenizer).encode(example)
    weighted = [token for token, weight in zip(document.tokens, document.weights, strict=True) if weight > 0]
    assert tokenizer.decode(weighted, skip_special_tokens=False) == "Hello!<|im_end|>4<|im_end|>"


def test_a_packed_row_gives_each_document_the_loss_it_has_alone(tokenizer: Tokenizer):
    torch.manual_seed(0)
    network = Network(Shape())
    packer = Packer(training_examples(0), Encoder(tokenizer), num_short_rows=1)
    batch = packer.step()[0]
    packed = network(batch.tokens, batch.documents, batch.weights)
    alone = torch.zeros(())
    for number in range(int(batch.documents.max()) + 1):
        chosen = batch.documents == number
        rows = [part[chosen][None] for part in (batch.tokens, batch.documents, batch.weights)]
        alone = alone + network(*rows)
    torch.testing.assert_close(packed, alone, rtol=2e-2, atol=0)
    assert token_id(tokenizer, "<|endoftext|>") == 0


def test_rates_rise_hold_and_fall_to_zero():
    assert rate_scale(0.0) == 0.0
    assert rate_scale(0.2) == 1.0
    assert rate_scale(1.0) == 0.0
    assert 0 < rate_scale(0.9) < rate_scale(0.6) < 1


class Interrupted(Exception):
    pass


class InterruptedPacker(Packer):
    """Gives the rows of some steps, then fails."""

    steps_left = 3

    def step(self) -> list[Batch]:
        if not self.steps_left:
            raise Interrupted
        self.steps_left -= 1
        return super().step()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_from_its_checkpoint_to_the_same_weights(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "CHECKPOINT_STEPS", 2)

    def run(packer_kind: type[Packer], folder: str, start_seed: int) -> Network:
        torch.manual_seed(start_seed)
        network = Network(Shape(num_layers=1))
        (tmp_path / folder).mkdir(exist_ok=True)
        chosen = Settings(
            tmp_path / folder, None, 5, 0.0, seed=0, rows=1, threads=1, matrix_rate=0.02, other_rate=0.004
        )
        train(network, packer_kind(training_examples(0), Encoder(tokenizer), 1), chosen)
        return network

    undisturbed = run(Packer, "whole", 0).state_dict()
    with pytest.raises(Interrupted):
        run(InterruptedPacker, "interrupted", 0)
    resumed = run(Packer, "interrupted", 1).state_dict()
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)


def test_a_run_may_start_from_earlier_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = Network(Shape(num_layers=1)), Network(Shape(num_layers=1))
    save(first, tmp_path, eos_token_id=2, pad_token_id=0)
    vocabulary = json.loads(tokenizer.to_str())
    vocabulary["model"]["vocab"]["renamed"] = vocabulary["model"]["vocab"].pop("e")
    vocabulary["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    other = tokenizer.token_to_id("e")
    fresh = second.model.embed_tokens.weight[other].clone()
    load_start(second, tokenizer, tmp_path)
    earlier = {name: weight.bfloat16().float() for name, weight in first.state_dict().items()}
    earlier["model.embed_tokens.weight"][other] = fresh
    torch.testing.assert_close(second.state_dict(), earlier, rtol=0, atol=0)
