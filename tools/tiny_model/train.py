"""Trains `tiny` on a CPU, from scratch or from earlier weights, and writes a Hugging Face directory.

    python -m tools.tiny_model.train --out DIR --steps 4000
    python -m tools.tiny_model.train --out DIR --steps 1000 --start EARLIER --matrix-rate 0.01 --other-rate 0.002

With ``--steps`` the run is reproducible: text, initial weights and rows follow from the seed (bits
may differ between machines and torch builds). ``--minutes`` fits the schedule to a time instead.
A run of so many steps that was interrupted goes on from its last checkpoint when it is started again.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  (bare path types)
from tokenizers import Tokenizer

from tools.tiny_model.grammar import training_examples
from tools.tiny_model.network import Network, Shape
from tools.tiny_model.optimizer import Optimizer
from tools.tiny_model.packing import Encoder, Packer
from tools.tiny_model.tokenizer import (
    END_OF_TEXT,
    MAX_LENGTH,
    TURN_END,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_STEPS = 50
WARM_UP = 0.01
FLAT_UNTIL = 0.35


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a training run."""

    out: Path
    start: Path | None
    steps: int | None
    minutes: float
    seed: int
    rows: int
    threads: int
    matrix_rate: float
    other_rate: float


def rate_scale(progress: float) -> float:
    """Warm up, hold, then fall linearly to zero; ``progress`` runs from 0 to 1."""
    if progress < WARM_UP:
        return progress / WARM_UP
    if progress < FLAT_UNTIL:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - FLAT_UNTIL))


def train(network: Network, packer: Packer, settings: Settings) -> int:
    """Run all steps; returns how many there were."""
    optimizer = Optimizer(network, settings.matrix_rate, settings.other_rate)
    progress_of = _progress(settings)
    step = _go_on(network, optimizer, settings)
    for _ in range(step):
        packer.step()
    started, first, num_tokens, recent = time.monotonic(), step, 0, 0.0
    while (progress := progress_of(step)) < 1.0:
        batches = packer.step()
        total_weight = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        for batch in batches:
            loss = network(batch.tokens, batch.documents, batch.weights) / total_weight
            loss.backward()
            recent += 0.02 * loss.item()
            num_tokens += batch.tokens.numel()
        recent *= 0.98
        optimizer.step(rate_scale(progress))
        step += 1
        if step % CHECKPOINT_STEPS == 0:
            seconds = time.monotonic() - started
            settled = recent / (1 - 0.98 ** (step - first))
            print(
                f"step {step} progress {progress:.3f} loss {settled:.4f} "
                f"tokens {num_tokens / 1e6:.2f}M {num_tokens / seconds:.0f} tokens/s",
                flush=True,
            )
        if step % CHECKPOINT_STEPS == 0:
            _save_checkpoint(network, optimizer, settings, step)
    return step


def _save_checkpoint(network: Network, optimizer: Optimizer, settings: Settings, step: int) -> None:
    unfinished = settings.out / f"{CHECKPOINT}.new"
    state = {"step": step, "network": network.state_dict(), "optimizer": optimizer.state()}
    torch.save(state, unfinished)
    unfinished.rename(settings.out / CHECKPOINT)


def _go_on(network: Network, optimizer: Optimizer, settings: Settings) -> int:
    """Load the checkpoint of an interrupted run; returns how many steps it had done."""
    checkpoint = settings.out / CHECKPOINT
    if settings.steps is None or not checkpoint.exists():
        return 0
    state = torch.load(checkpoint)
    network.load_state_dict(state["network"])
    optimizer.load(state["optimizer"])
    return state["step"]


def load_start(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Take over the weights of an earlier directory, and its embeddings of the ids that stand for the same token."""
    weights = load_file(directory / "model.safetensors")
    earlier = Tokenizer.from_file(str(directory / "tokenizer.json"))
    same = [i for i in range(network.shape.vocab_size) if tokenizer.id_to_token(i) == earlier.id_to_token(i)]
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            chosen = same if "embed" in name else slice(None)
            parameter[chosen] = weights[name][chosen].float()


def _progress(settings: Settings) -> Callable[[int], float]:
    if settings.steps is not None:
        steps = settings.steps
        return lambda step: step / steps
    started = time.monotonic()
    return lambda step: (time.monotonic() - started) / (60 * settings.minutes)


def save(network: Network, directory: Path, *, eos_token_id: int, pad_token_id: int) -> None:
    """Write config.json, generation_config.json and bfloat16 weights."""
    shape = network.shape
    config = shape.config(eos_token_id=eos_token_id, pad_token_id=pad_token_id, max_length=MAX_LENGTH)
    generation = {
        "bos_token_id": None,
        "eos_token_id": [eos_token_id, pad_token_id],
        "pad_token_id": pad_token_id,
        "do_sample": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: p.detach().bfloat16().contiguous() for name, p in network.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--start", type=Path, help="directory of earlier weights to start from")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="train this many steps (reproducible)")
    length.add_argument("--minutes", type=float, default=30.0, help="train for this many minutes instead (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16, help="rows of 256 tokens per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--other-rate", type=float, default=0.004, help="peak rate of AdamW")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    settings = parse_arguments()
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, settings.out)
    network = Network(Shape(vocab_size=tokenizer.get_vocab_size()))
    print(f"{sum(p.numel() for p in network.parameters())} parameters", flush=True)
    if settings.start is not None:
        load_start(network, tokenizer, settings.start)
    packer = Packer(training_examples(settings.seed), Encoder(tokenizer), settings.rows)
    steps = train(network, packer, settings)
    save(
        network,
        settings.out,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    (settings.out / CHECKPOINT).unlink(missing_ok=True)
    print(f"done: {steps} steps, written to {settings.out}")


if __name__ == "__main__":
    main()
