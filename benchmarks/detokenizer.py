"""Time per token of the detokenizer: decode the frame, take the step, encode the text; and of the codec alone.

A step has `--streams` streams, one token each, taken from encoded text in several scripts; rows differ in vocabulary
and stop strings. Nothing else runs, so the figures are the cost of this one process's share of the ring.
"""

import argparse
import itertools
import statistics
import time

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mesh.address import Address
from mesh.runtime.effects import Tell, Told
from nodes.detokenizer.config import DetokenizerLimits
from nodes.detokenizer.core import DetokenizerCore
from nodes.detokenizer.incremental import DecoderFactory
from nodes.protocol import HotNodeMessage, StreamOpen, TokenBatch
from nodes.request import StopRules

TEXT = [
    "The scheduler sends one columnar frame per step, and the detokenizer answers with one per gateway. ",
    "Größere Wörter und naïve Cafés — 你好，世界。これは試験です。 🙂👩‍👩‍👧‍👦 ",
    "def handle(self, event, now):\n    return [command for command in self.core.handle(event, now)]\n",
]
SCHEDULER = Address("decode-0", 1)


def byte_level() -> Tokenizer:
    """A byte-level BPE like those of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def windowed() -> Tokenizer:
    """The same with a decoder that is not known to be bytes only, so that the general way of decoding is taken."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def measure(tokenizer: Tokenizer, stops: list[str], num_streams: int, num_steps: int) -> tuple[float, float, float]:
    """Microseconds per token: (core, core with codec, codec alone), medians over the steps."""
    core = DetokenizerCore(DecoderFactory(tokenizer), DetokenizerLimits())
    rules = StopRules(1 << 20, stop=stops)
    opens = [StreamOpen(i, f"chatcmpl-{i:024d}", 0, f"gateway-{i % 2}", rules, [], []) for i in range(num_streams)]
    empty = TokenBatch(streams=[], positions=[], counts=[], token_ids=[], opens=opens)
    core.handle(Told(SCHEDULER, empty), 0.0)
    ids = itertools.cycle(tokenizer.encode("".join(TEXT), add_special_tokens=False).ids)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(HotNodeMessage)
    columns = list(range(num_streams)), [1] * num_streams
    core_s: list[float] = []
    whole_s: list[float] = []
    codec_s: list[float] = []
    for step in range(num_steps):
        batch = TokenBatch(
            streams=columns[0], positions=[step] * num_streams, counts=columns[1],
            token_ids=[next(ids) for _ in range(num_streams)],
        )  # fmt: skip
        frame = encoder.encode(batch)
        start = time.perf_counter()
        arrived = decoder.decode(frame)
        decoded = time.perf_counter()
        commands = core.handle(Told(SCHEDULER, arrived), step * 0.01)
        handled = time.perf_counter()
        for command in commands:
            if isinstance(command, Tell):
                encoder.encode(command.message)
        end = time.perf_counter()
        core_s.append(handled - decoded)
        whole_s.append(end - start)
        codec_s.append(end - start - (handled - decoded))
    scale = 1e6 / num_streams
    return (
        statistics.median(core_s) * scale,
        statistics.median(whole_s) * scale,
        statistics.median(codec_s) * scale,
    )


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    cases = {
        "byte-level": (byte_level(), []),
        "byte-level, 2 stop strings": (byte_level(), ["\n\nUser:", "</answer>"]),
        "windowed": (windowed(), []),
    }
    print("case                         streams  core us/token  with codec us/token  codec alone us/token")
    for name, (tokenizer, stops) in cases.items():
        for num_streams in args.streams:
            core, whole, codec = measure(tokenizer, stops, num_streams, args.steps)
            print(f"{name:28} {num_streams:7}  {core:13.2f}  {whole:19.2f}  {codec:20.2f}")


if __name__ == "__main__":
    main()
