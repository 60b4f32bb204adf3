"""Which steps run, in which order and for how long (pure): a step never gets more time than the whole run has left."""

from collections.abc import Sequence
from typing import Final, NamedTuple

OK: Final = "ok"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
NOT_REACHED: Final = "not reached"

_LEAST_S: Final = 5.0
"""With less time than this left, no step is begun."""
_PYTEST: Final = ("-m", "pytest", "-m", "gpu", "-q", "-s", "-p", "no:cacheprovider")
_FLASHINFER: Final = (
    "tests/nodes/worker/cuda/test_flashinfer_backend.py",
    "tests/nodes/worker/cuda/test_flashinfer_python.py",
)
"""These need FlashInfer but no GPU: a development host has neither."""
_PARITY: Final = "transformers or flashinfer_agrees or graphs"


class Step(NamedTuple):
    """One process: arguments of `python`, and how many seconds it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


class Outcome(NamedTuple):
    """What became of a step; `detail` is one line for people."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""


STEPS: Final = (
    Step("kernels", ("-m", "benchmarks.gpu.compile_kernels"), 300.0),
    Step("parity", (*_PYTEST, "tests/gpu/worker/test_runner_gpu.py", "-k", _PARITY), 150.0),
    Step("roofline", ("-m", "benchmarks.gpu.roofline"), 60.0),
    Step("steps-0.6b", ("-m", "benchmarks.gpu.steps", "--models", "random:qwen3-0.6b"), 120.0),
    Step("memory", (*_PYTEST, "tests/gpu/test_cuda_pool.py", "tests/gpu/test_cuda_ipc.py"), 90.0),
    Step("serving", (*_PYTEST, "tests/gpu/test_serving_gpu.py"), 180.0),
    Step("steps-8b", ("-m", "benchmarks.gpu.steps", "--models", "random:qwen3-8b"), 180.0),
    Step("transfer", ("-m", "benchmarks.gpu.transfer"), 60.0),
    Step("throughput", ("-m", "benchmarks.gpu.throughput"), 120.0),
    Step("gaps", ("-m", "benchmarks.gpu.gaps"), 90.0),
    Step("contexts", ("-m", "benchmarks.gpu.contexts"), 90.0),
    Step("flashinfer-calls", ("-m", "pytest", "-q", "-p", "no:cacheprovider", *_FLASHINFER), 90.0),
    Step("attention", (*_PYTEST, "tests/gpu/worker/test_attention_gpu.py"), 90.0),
    Step("planning", ("-m", "benchmarks.gpu.planning"), 90.0),
    Step("transformers", ("-m", "benchmarks.gpu.transformers_peer"), 150.0),
    Step("handoff", ("-m", "benchmarks.gpu.handoff"), 150.0),
    Step("throughput-mesh", ("-m", "benchmarks.gpu.throughput", "--mesh"), 150.0),
    Step("kernel-tests", (*_PYTEST, "tests/gpu/worker/test_kernels_gpu.py"), 90.0),
    Step("runner-tests", (*_PYTEST, "tests/gpu/worker/test_runner_gpu.py", "-k", f"not ({_PARITY})"), 150.0),
    Step("vectors", (*_PYTEST, "tests/gpu/worker/test_vectors_gpu.py"), 90.0),
    Step("tcp", (*_PYTEST, "tests/gpu/test_tcp_gpu.py"), 60.0),
    Step("nccl", (*_PYTEST, "tests/gpu/test_nccl.py"), 90.0),
    Step("nccl-one-device", (*_PYTEST, "tests/gpu/test_nccl_one_device.py"), 120.0),
    Step("tensor-parallel", (*_PYTEST, "tests/gpu/worker/test_tensor_parallel_gpu.py"), 180.0),
    Step("release", (*_PYTEST, "tests/gpu/test_release_gpu.py", "tests/gpu/worker/test_memory_saver_gpu.py"), 240.0),
    Step("ranks", (*_PYTEST, "tests/gpu/test_ranks_gpu.py"), 240.0),
)
"""First what others wait for, then what matters most: equal texts and a first figure, then the rest of both."""


class UnknownStep(ValueError):
    """`--only` names a step that does not exist; the message lists those that do."""


def choose(only: Sequence[str]) -> list[Step]:
    """The steps whose name begins with one of `only`; all if `only` is empty. Raises UnknownStep."""
    for name in only:
        if not any(step.name.startswith(name) for step in STEPS):
            raise UnknownStep(f"there is no step {name!r}; there are {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if not only or step.name.startswith(tuple(only))]


def time_for(step: Step, left_s: float) -> float | None:
    """Seconds that a step may take when the whole run has `left_s` left; None: it is not begun."""
    limit = min(step.limit_s, left_s)
    return limit if limit >= _LEAST_S else None


def state_of(return_code: int | None, output: str) -> tuple[str, str]:
    """State and detail of a process that ended, or (None) was killed when its time was over.

    A benchmark says `skipped: why` itself; a pytest run in which every test was skipped has shown nothing either.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if not line.startswith("--")), "")
    if return_code is None:
        return FAILED, f"killed at its time limit; last line: {last}"[:300]
    skipped = next((line for line in lines if line.startswith("skipped:")), "")
    summary = last.strip("= ")
    if return_code:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  ", "error:"))]
        return FAILED, f"exit {return_code}: {failed[0] if failed else last}"[:300]
    if skipped:
        return SKIPPED, skipped.removeprefix("skipped:").strip()[:300]
    if " skipped" in summary and " passed" not in summary:
        return SKIPPED, summary[:300]
    return OK, summary[:300] if " passed" in summary else ""


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 only if everything that was asked for ran and passed."""
    return 0 if outcomes and all(one.state == OK for one in outcomes) else 1
