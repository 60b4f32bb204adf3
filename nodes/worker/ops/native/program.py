"""A model as a list of operations (`program.h`): how it is put together, and the memory that it runs in.

An operation is one phase of a step. It reads and writes values: rows of numbers, as many rows as the step has. A value
holds a buffer from the operation that makes it to the last that reads it, so a few buffers serve all layers.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from nodes.models.spec import Activation
from nodes.worker.ops.native.attention import AttendCall
from nodes.worker.ops.native.builds import Library
from nodes.worker.parallel.collectives import Collectives

EMBED: Final = 0
NORM: Final = 1
CONVERT: Final = 2
PRODUCT: Final = 3
GATED: Final = 4
WRITE: Final = 5
ATTEND: Final = 6
SELECT: Final = 7
HEAD: Final = 8
DRAW: Final = 9
ROUTE: Final = 10
GATHER: Final = 11
EXPERTS: Final = 12
COMBINE: Final = 13
POOL: Final = 14
LAYER_NORM: Final = 15
ACTIVATED: Final = 16

NONE: Final = -1
_PRODUCTS: Final = (PRODUCT, GATED, HEAD, ACTIVATED)
ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2, "relu": 3}
"""As in linear.h."""
_MAX_OPERATIONS: Final = 2048
"""`MAX_PHASES` of threads.h, and one operation is one phase; a layer takes about ten, so 200 layers fit."""
_MAX_THREADS: Final = 64
"""As in threads.h; scratch is allocated for so many."""
_PANEL: Final = 64
_ALIGNMENT: Final = 64
_FEW_ROWS: Final = 2
_TAG_BYTES: Final = 64
"""A cache line, so that the normed rows behind it are aligned; the tag itself has 8 bytes."""


class ProgramUnfit(Exception):
    """The kernels cannot express a model; the message says which part of it."""


class Operation(ctypes.Structure):
    """`Operation` of program.h, field by field: sizes and offsets are the compiler's."""

    kind: int
    x: int
    y: int
    add: int
    norm: int
    n: int
    k: int
    num_experts: int

    _fields_ = (
        *((name, c_int32) for name in ("kind", "is_selected", "x", "y", "add", "norm", "activation", "attend")),
        *((name, c_int32) for name in ("choices", "num_experts", "top_k", "is_normalized", "is_int8")),
        ("n", c_int64),
        ("k", c_int64),
        ("experts", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("positions", c_void_p),
        ("types", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
    )


class Step(ctypes.Structure):
    """`Step` of program.h, field by field: sizes and offsets are the compiler's."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "token_ids", "places", "spans", "pages", "sampled", "drawn", "logits")),
        ("blocks", c_void_p),
        *((name, c_void_p) for name in ("pooled_rows", "pooled")),
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_sampled", "num_pooled")),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("width", c_int64))


class _Program(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("operations", "buffers", "attends", "counts", "scratch")),
        ("scratch_bytes", c_int64),
        *((name, c_void_p) for name in ("best", "chosen", "ends")),
        *((name, c_int32) for name in ("num_attends", "dtype", "number")),
    )


class Value(NamedTuple):
    """What an operation makes: `width` numbers of `item_bytes` for each row, or for each sampled row (`is_selected`).

    `per_row`: how many times for each row, if a row goes through several experts.
    """

    number: int
    width: int
    item_bytes: int
    is_selected: bool
    per_row: int = 1


class Sum(NamedTuple):
    """Before operation `before`, `value` is summed over all ranks, and the sum is added to `add` if there is one."""

    before: int
    value: Value
    add: Value | None


class Recorder:
    """Records operations, one after the other; `Program` turns them into a list that runs."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.attends: list[AttendCall] = []
        self.attended: list[tuple[Value, Value]] = []
        self.sums: list[Sum] = []
        self.owned: list[object] = []
        """Objects that operations point to."""
        self._made: list[int] = []
        self._last: list[int] = []

    def value(self, width: int, item_bytes: int, *, is_selected: bool = False, per_row: int = 1) -> Value:
        """A new value, which the next operation makes."""
        value = Value(len(self.values), width, item_bytes, is_selected, per_row)
        self.values.append(value)
        self._made.append(len(self.operations))
        self._last.append(len(self.operations))
        return value

    def append(self, kind: int, x: Value | None, y: Value, **fields: Any) -> None:
        """Record one operation that makes `y` from `x`, or changes `y`; `fields` are other fields of `Operation`."""
        for read in (x, y, fields.get("add"), fields.get("choices")):
            if read is not None:
                self._last[read.number] = len(self.operations)
        self.operations.append(operation(kind, x, y, **fields))

    def sum_over_ranks(self, value: Value, add: Value | None = None) -> Value:
        """Record that `value`, just made, is one rank's part of a sum; returns the value that will hold the sum."""
        self.sums.append(Sum(len(self.operations), value, add))
        for one in (value, add):
            if one is not None:
                # As if the next operation read it: that one's result must not be put in the same buffer.
                self._last[one.number] = len(self.operations)
        return value if add is None else add

    def append_experts(self, experts: Sequence[Operation], x: Value, y: Value) -> None:
        """Record one operation that makes `y` from `x`, each row by the product of the expert it was gathered for."""
        owned = (Operation * len(experts))(*experts)
        self.owned.append(owned)
        fields = {"num_experts": len(experts), "top_k": y.per_row, "n": experts[0].n, "k": experts[0].k}
        self.append(EXPERTS, x, y, experts=ctypes.addressof(owned), **fields)

    def fuse_norms(self) -> None:
        """Let a product compute the norm before it, where nothing else reads what the norm makes."""
        for index, norm in enumerate(self.operations[:-1]):
            product = self.operations[index + 1]
            made = self.values[norm.y]
            # Fused, what the norm makes never reaches memory, so nobody but that product may read it.
            is_alone = self._made[made.number] == index and self._last[made.number] == index + 1
            # A thread that is late with its norm must not read rows that the product has changed.
            is_kept = norm.x not in (product.y, product.add)
            if norm.kind == NORM and product.kind in _PRODUCTS and product.x == norm.y and is_alone and is_kept:
                norm.norm, product.norm = index + 1, index
                self._last[norm.x] = max(self._last[norm.x], index + 1)

    def keep(self, value: Value) -> None:
        """Let nothing take the buffer of `value` any more, so that what reads it can be computed again."""
        self._last[value.number] = len(self.operations)

    def places(self) -> tuple[list[int], list[int]]:
        """The buffer of each value, and the bytes of a row of each buffer."""
        buffers: list[int] = []
        busy_until: list[int] = []
        places: list[int] = []
        for value, made, last in zip(self.values, self._made, self._last, strict=True):
            num_bytes = value.width * value.item_bytes * value.per_row
            # Only a buffer of the same size: a row's address in it is the row's number times its bytes.
            free = [index for index, end in enumerate(busy_until) if end < made and buffers[index] == num_bytes]
            if not free:
                buffers.append(num_bytes)
                busy_until.append(last)
            place = free[0] if free else len(buffers) - 1
            busy_until[place] = last
            places.append(place)
        return places, buffers


def operation(
    kind: int, x: Value | None, y: Value, add: Value | None = None, choices: Value | None = None, **fields: Any
) -> Operation:
    """One operation, not in any list; `fields` are other fields of `Operation`."""
    read = {"x": x, "y": y, "add": add, "choices": choices}
    numbers = {name: NONE if value is None else value.number for name, value in read.items()}
    return Operation(kind=kind, is_selected=y.is_selected, norm=NONE, **numbers, **fields)


class Program:
    """A recorded list in memory, ready to run. Raises ProgramUnfit if it is too long."""

    def __init__(self, library: Library, recorder: Recorder, dtype: int) -> None:
        if len(recorder.operations) > _MAX_OPERATIONS:
            raise ProgramUnfit(f"the model takes {len(recorder.operations)} operations, at most {_MAX_OPERATIONS} fit")
        recorder.fuse_norms()
        self._functions = library.functions
        self._values, self._attended = recorder.values, recorder.attended
        self._places, self._row_bytes = recorder.places()
        self._operations = (Operation * len(recorder.operations))(*recorder.operations)
        self._buffers = (_Buffer * len(recorder.values))()
        self.attends = (AttendCall * len(recorder.attends))(*recorder.attends)
        self._counts = (c_int32 * len(recorder.operations))()
        self._owned, self._sums = recorder.owned, recorder.sums
        self._select = next((at for at, one in enumerate(recorder.operations) if one.kind == SELECT), NONE)
        num_experts = max(one.num_experts for one in recorder.operations)
        self._chosen, self._ends = (c_int32 * (num_experts + 1))(), (c_int32 * num_experts)()
        self._head_width = sum(one.n for one in recorder.operations if one.kind == HEAD)
        depths = [one.k for one in recorder.operations if one.kind in _PRODUCTS]
        scratch_bytes = _TAG_BYTES + -(-_FEW_ROWS * 4 * max(depths) // _ALIGNMENT) * _ALIGNMENT
        self._scratch = _Memory(library, _MAX_THREADS * scratch_bytes)
        self._program = _Program(
            operations=ctypes.addressof(self._operations),
            buffers=ctypes.addressof(self._buffers),
            attends=ctypes.addressof(self.attends),
            counts=ctypes.addressof(self._counts),
            scratch=self._scratch.at,
            scratch_bytes=scratch_bytes,
            chosen=ctypes.addressof(self._chosen),
            ends=ctypes.addressof(self._ends),
            num_attends=len(recorder.attends),
            dtype=dtype,
        )
        self._library = library
        self._memory: _Memory | None = None
        self._capacity = 0

    def run(self, step: Step, collectives: Collectives | None = None) -> None:
        """Compute a step; what it points to must live until this returns. Raises CollectiveFailed.

        `collectives` is required if the program was recorded for one of several ranks.
        """
        if step.num_rows > self._capacity:
            self._reserve(step.num_rows)
        done = 0
        # One call for each stretch between two sums: the library has no way to reach other ranks.
        for before, value, add in self._sums:
            self._functions.kvmesh_step(ctypes.byref(self._program), ctypes.byref(step), done, before)
            done = before
            assert collectives is not None, "a rank's program needs the collectives of its group"
            total = collectives.all_reduce(self._rows(value, step.num_rows))
            if add is not None:
                self._rows(add, step.num_rows).add_(total)
            else:
                self._rows(value, step.num_rows).copy_(total)
        self._functions.kvmesh_step(ctypes.byref(self._program), ctypes.byref(step), done, len(self._operations))

    def run_head(self, step: Step) -> None:
        """Compute the logits of other rows of the step that was just run: `step` differs in what is sampled only."""
        assert self._select != NONE, "a model selects rows before its head"
        self._functions.kvmesh_step(
            ctypes.byref(self._program), ctypes.byref(step), self._select, len(self._operations)
        )

    def _rows(self, value: Value, num_rows: int) -> Tensor:
        """A float32 value of the running step, `[rows, width]`, in place."""
        floats = c_float * (num_rows * value.width)
        at: int = self._buffers[value.number].at
        return torch.frombuffer(floats.from_address(at), dtype=torch.float32).view(num_rows, value.width)

    def _reserve(self, num_rows: int) -> None:
        """Allocate buffers for `num_rows` and some more, because the next step is often a little larger."""
        # In steps of 64 rows, so that a batch that grows by one does not allocate at each step.
        self._capacity = rows = -(-num_rows // 64) * 64
        best_bytes = 8 * -(-self._head_width // _PANEL)
        starts, end = [], 0
        for row_bytes in (*self._row_bytes, best_bytes):
            starts.append(end)
            end += -(-row_bytes * rows // _ALIGNMENT) * _ALIGNMENT
        self._memory = None
        # The old memory was freed first: both together could be more than there is.
        memory = self._memory = _Memory(self._library, max(end, 1))
        for value, place, buffer in zip(self._values, self._places, self._buffers, strict=True):
            buffer.at, buffer.width = memory.at + starts[place], value.width
        self._program.best = memory.at + starts[-1]
        for call, (qkv, out) in zip(self.attends, self._attended, strict=True):
            call.q = self._buffers[qkv.number].at
            call.k = call.q + 4 * call.heads * call.head_dim
            call.v = call.k + 4 * call.kv_heads * call.head_dim
            call.out = self._buffers[out.number].at


class _Memory:
    """Zeroed bytes that are freed with this object."""

    def __init__(self, library: Library, num_bytes: int) -> None:
        self.at: int = library.functions.kvmesh_allocate(num_bytes)
        if not self.at:
            raise MemoryError(f"cannot allocate {num_bytes:,} bytes for a step's rows")
        weakref.finalize(self, library.functions.kvmesh_free, self.at, num_bytes).atexit = False
