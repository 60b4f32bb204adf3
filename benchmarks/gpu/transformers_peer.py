"""transformers' continuous batching against this runner, on the same weights, in one process.

    python -m benchmarks.gpu.transformers_peer [--model random:qwen3-0.6b]

Each batch is generated twice, with few and with many tokens, and the difference is decode alone. Attention is `paged`
SDPA unless flash attention is installed, which transformers then uses by itself. Prints `skipped:` and why if this
version of transformers cannot do it. Not yet run on a GPU.
"""

import argparse
import time
from typing import Any

from benchmarks.gpu.figures import say
from benchmarks.gpu.loaded import load, unload
from benchmarks.gpu.steps import decode, numbers
from nodes.model_spec import ModelSpec, resolve_model
from nodes.model_spec.weight_index import expected_shapes

FEW = 8


def build_peer(spec: ModelSpec, device: str) -> Any:
    """The same network in transformers, with the weights that the worker has."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nodes.worker.weights.random_weights import RandomWeights

    config = Qwen3Config(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
        num_key_value_heads=spec.num_kv_heads, max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.rms_norm_eps, tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta}, attn_implementation="sdpa",
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    # The rotary frequencies, which are no weights, were left empty too.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    weights = RandomWeights(spec, torch.bfloat16)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in expected_shapes(spec):
            parameters[name].copy_(weights.tensor(name))
    return model


def peer_decode(model: Any, batch: int, context: int, num_steps: int) -> float:
    """Tokens/s."""
    from transformers import GenerationConfig

    prompts = [[100 + (i * 7 + j) % 900 for j in range(context - num_steps // 2)] for i in range(batch)]
    seconds: list[float] = []
    for count in (FEW, FEW, FEW + num_steps):
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        answers = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        seconds.append(time.perf_counter() - start)
        if len(answers) != batch or any(len(one.generated_tokens) != count for one in answers.values()):
            raise RuntimeError(f"transformers did not answer {batch} prompts with {count} tokens each")
    return batch * num_steps / (seconds[2] - seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--batches", type=numbers, default="1,32,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    spec = resolve_model(args.model)
    most = max(args.batches)
    loaded = load(args.model, most * (args.context + args.steps + 32), max(most, 64), args.device)
    ours = {batch: decode(loaded, batch, args.context, args.steps) for batch in args.batches}
    unload(loaded)
    try:
        model = build_peer(spec, args.device)
        for batch in args.batches:
            theirs = peer_decode(model, batch, args.context, args.steps)
            say(
                f"{args.model.removeprefix('random:')} decode, batch {batch}, beside transformers",
                f"{ours[batch]:,.0f} tok/s",
                f"{ours[batch] / theirs:.2f} times transformers' continuous batching ({theirs:,.0f} tok/s)",
            )
    except Exception as error:  # noqa: BLE001 # another project's version, whatever it raises
        print(f"skipped: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
