"""How much memory the largest step takes, measured on the device; the arithmetic is in `device_memory`."""

from array import array

import torch

from kvstore.layout import PADDING_PAGE
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.ops.torch.attention import DeviceAttention
from nodes.worker.ops.torch.batch import host_batch, pack, pinned, unpack
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep


def largest_step(num_rows: int, page_size: int, context_length: int) -> RunnableStep:
    """A step of `num_rows` rows, or as many as one context has: a decoding sequence, and a chunk after one position.

    Both are on the padding page, where nothing is lost, and go through every kernel that a step can need.
    """
    chunk = min(num_rows, context_length) - 1
    num_pages = -(-(1 + chunk) // page_size)
    nobody = OpenSequence(Open(0, 0, 1, Sampling()))
    starts, counts = ([0, 1], [1, chunk]) if chunk > 0 else ([0], [1])
    num_rows = len(starts)
    rows = Rows([nobody] * num_rows, starts, counts, range(num_rows), [0] * num_rows, draws=[0] * num_rows)
    return RunnableStep(0, rows, array("i", [0] * (1 + chunk)), array("i", [PADDING_PAGE] * num_pages))


def measured_activation_bytes(network: DeviceNetwork, attention: DeviceAttention, num_rows: int, page_size: int) -> int:
    """Peak bytes that the largest step takes on the network's CUDA device, whose kernels are then compiled and warm."""
    device = network.device
    batch = host_batch(largest_step(num_rows, page_size, network.spec.context_length), page_size)
    arrays = unpack(pinned(pack(batch), device).to(device), batch.num_rows, 0)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attention.plan(batch, arrays)
    network.forward(arrays.token_ids, arrays.positions, attention, arrays.sampled)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
