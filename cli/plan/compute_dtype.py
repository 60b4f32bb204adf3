"""Which dtype a model is computed in if its own is float16, in which nothing here computes. Pure.

Decided once, before anything is started, and told to every actor: pools, workers and checks have to agree.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from kvstore.pool.device import CPU
from nodes.model_spec import ModelSpec

BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
"""Flags of CPUs that multiply bfloat16, as /proc/cpuinfo names them; the last is ARM's."""


class ComputeDtype(NamedTuple):
    """The dtype for all actors (`auto`: the checkpoint's own), and what people should know about it."""

    dtype: str
    note: str = ""


def choose_dtype(asked: str, spec: ModelSpec, device: str, cpu_flags: Collection[str]) -> ComputeDtype:
    """`asked`, unless that is the checkpoint's own and the checkpoint is float16.

    bfloat16 has float16's size and float32's range, with 8 significant bits instead of 11. Where the device computes in
    it, it is the choice for memory and speed; elsewhere float32 keeps every bit and costs only memory.
    """
    if asked != "auto" or spec.dtype != "float16":
        return ComputeDtype(asked)
    if device != CPU or BFLOAT16_FLAGS.intersection(cpu_flags):
        where = "this CPU's" if device == CPU else "the device's"
        return ComputeDtype(
            "bfloat16",
            f"{spec.name} has float16 weights: computed in bfloat16, {where} format, which keeps 8 of their 11"
            " significant bits; --dtype float32 keeps all",
        )
    return ComputeDtype(
        "float32",
        f"{spec.name} has float16 weights: computed in float32, since this CPU has no kernels for 16 bits; that takes"
        " twice the memory; --dtype bfloat16 does not",
    )
