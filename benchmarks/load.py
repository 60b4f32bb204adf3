"""A closed-loop streaming client for OpenAI-compatible servers, small enough not to dominate the measurement.

Raw asyncio streams and a scan for `data:` lines: an HTTP library would take more of the two cores than the mesh does.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One request: seconds from start to each event with text, and the tokens that the server's usage counted."""

    start_s: float
    event_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    end_s: float = 0.0


@dataclass(frozen=True)
class Level:
    """Results of one concurrency level. TPOT is first to last event over tokens less one, as in vLLM's tools."""

    concurrency: int
    num_requests: int
    wall_s: float
    num_tokens: int
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over wall time, prefill included."""
        return self.num_tokens / self.wall_s


async def stream_completion(host: str, port: int, body: dict[str, Any], sample: Sample | None = None) -> Sample:
    """POST /v1/completions with `stream`; raises RuntimeError on anything but a complete 200.

    The caller can look at a `sample` that it passes while the stream runs.
    """
    if sample is None:
        sample = Sample(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
    done = False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        if b'"error"' in line[:20]:
            raise RuntimeError(line.decode())
        if b'"usage":{' in line or b'"usage": {' in line:
            event = json.loads(line[6:])
            sample.num_tokens = event["usage"]["completion_tokens"]
            if not event["choices"] or not event["choices"][0].get("text"):
                continue
        if b'"text":""' not in line:
            sample.event_times_s.append(time.perf_counter())
    sample.end_s = time.perf_counter()
    writer.close()
    if not done or not sample.num_tokens:
        got = f"{len(sample.event_times_s)} texts and {sample.num_tokens} tokens"
        raise RuntimeError(f"the stream ended {'with' if done else 'without'} [DONE] after {got}")
    return sample


def summarize(concurrency: int, samples: list[Sample], wall_s: float) -> Level:
    """Medians over requests (TTFT, TPOT) and over gaps between events (ITL)."""
    ttft = [s.event_times_s[0] - s.start_s for s in samples if s.event_times_s]
    gaps = sorted(b - a for s in samples for a, b in zip(s.event_times_s, s.event_times_s[1:], strict=False))
    tpot = [
        (s.event_times_s[-1] - s.event_times_s[0]) / (s.num_tokens - 1)
        for s in samples
        if s.num_tokens > 1 and s.event_times_s
    ]
    return Level(
        concurrency=concurrency,
        num_requests=len(samples),
        wall_s=wall_s,
        num_tokens=sum(s.num_tokens for s in samples),
        ttft_p50_ms=1e3 * statistics.median(ttft) if ttft else float("nan"),
        itl_p50_ms=1e3 * gaps[len(gaps) // 2] if gaps else float("nan"),
        itl_p99_ms=1e3 * gaps[int(len(gaps) * 0.99)] if gaps else float("nan"),
        tpot_p50_ms=1e3 * statistics.median(tpot) if tpot else float("nan"),
    )


async def closed_loop(
    host: str, port: int, concurrency: int, num_requests: int, make_body: Callable[[int], dict[str, Any]]
) -> Level:
    """`concurrency` clients, each sending its next request when the last has ended, `num_requests` in all."""
    numbers = iter(range(num_requests))
    samples: list[Sample] = []

    async def client() -> None:
        samples.extend([await stream_completion(host, port, make_body(number)) for number in numbers])

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, num_requests)):
            group.create_task(client())
    return summarize(concurrency, samples, time.perf_counter() - start)
