"""What is counted, kept and logged about requests: tokens and their pace, ends, slow ones, and a record of each call.
Owned by the service.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.actor import Context
from nodes.gateway.config import GatewayConfig
from nodes.gateway.records.call_log import CallLog, CallTrack
from nodes.gateway.records.line_file import LineFile
from nodes.gateway.records.open_calls import OpenCalls, open_calls_path
from nodes.gateway.records.request_log import Chooser
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.events import ABORT, Deliver, End
from nodes.gateway.shown.fingerprint import server_version
from nodes.protocol.attempts import OVER_SHARE
from nodes.protocol.records import CallsFound, FindCalls, SampleRecord

if TYPE_CHECKING:
    from nodes.gateway.records.otel.export import SpanExport

END_REASONS: Final = ("stop", "length", ABORT, "error")
_QUIET_S: Final = 60.0
"""A full disk stays full for a while, and each line in the log about it needs room there, too."""


class RequestAccount:
    """Metrics, records and log lines of one gateway's requests."""

    def __init__(self, ctx: Context, config: GatewayConfig) -> None:
        self._ctx = ctx
        self._slow_s = config.slow_request_s
        self.num_tokens = 0
        """Tokens delivered and not counted yet."""
        me = ctx.address.actor_id
        chooser = Chooser(
            config.request_log, slow_s=config.slow_request_s, slow_first_token_s=config.slow_first_token_s
        )
        self._calls = CallLog(me, ctx.describe().host, chooser)
        folder = config.request_log_folder
        self._lines = LineFile(Path(folder) / f"{me}.jsonl", config.request_log_bytes) if folder else None
        # Of calls that have a line when they end, and of no others.
        has_open = bool(folder) and config.request_log != "none"
        self._open = OpenCalls(open_calls_path(Path(folder), me, ctx.address.epoch)) if has_open else None
        self._failed_at: float | None = None
        self._untold_at: float | None = None
        self._export = self._begin_export(config) if config.otel_endpoint else None
        begin = ctx.metrics.begin
        begin("mesh_requests_ended_total", reason=END_REASONS)
        begin("mesh_generation_tokens_total", "mesh_prompt_tokens_total", "mesh_cached_tokens_total")
        begin("mesh_request_lines_lost_total")

    def begin(self, names: RequestNames, arrived_at: float) -> CallTrack:
        """A client's call arrived. `end` has to be called with what is returned."""
        return self._calls.begin(names, arrived_at, time.time())

    def read(self, track: CallTrack, names: RequestNames) -> None:
        """The body of a call was read; `names` are those that it gave."""
        track.read(self._ctx.now(), names)
        if self._open is not None:
            track.slot = self._open.put(track.told)

    def end(self, track: CallTrack, status: int, code: str) -> None:
        """The call is over: with this HTTP status, and the code of the error that it was answered with, if any."""
        line = self._calls.end(track, status, code, self._ctx.now())
        if self._open is not None:
            self._open.free(track.slot)
        if self._export is not None:
            self._export.add(self._calls.newest)
        # On the loop: a KB into the page cache, some hundred times a second at most, is not worth a thread.
        if line is None or self._lines is None:
            return
        try:
            self._lines.write(line)
        except OSError as error:
            self._ctx.metrics.count("mesh_request_lines_lost_total")
            now = self._ctx.now()
            if self._failed_at is None or now - self._failed_at >= _QUIET_S:
                self._failed_at = now
                # Reopened with the next line: somebody may have made room, or put the folder back.
                with contextlib.suppress(OSError):
                    self._lines.close()
                self._ctx.log.warning("request_line_lost", error=str(error), do="make room, or set request_log = none")

    def died(self, actor_id: str, epoch: int, reason: str) -> None:
        """A supervisor says that an actor is dead: calls that are under way say so too."""
        self._calls.died(actor_id, epoch, reason, self._ctx.now())

    def find(self, query: FindCalls, open_sample: Callable[[str], SampleRecord | None]) -> CallsFound:
        return self._calls.find(query, self._ctx.now(), open_sample, epoch=self._ctx.address.epoch)

    async def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._open is not None:
            self._open.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)

    def figures(self) -> dict[str, float]:
        """What became of the spans of calls, where they are sent to a collector."""
        return {} if self._export is None else self._export.figures()

    def _begin_export(self, config: GatewayConfig) -> "SpanExport":
        # Only here: nobody pays for a part that is not used.
        from nodes.gateway.records.otel.export import SpanExport

        me, loop = self._ctx.describe(), asyncio.get_running_loop()
        resource = {
            "service.name": "kvmesh", "service.version": server_version(), "service.instance.id": me.actor_id,
            "host.name": me.host, "kvmesh.model": config.model_name, "service.namespace": config.client_salt,
        }  # fmt: skip

        def tell(why: str) -> None:
            # From the exporter's thread, which may outlive the loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._untold, why)

        return SpanExport(config.otel_endpoint, {name: text for name, text in resource.items() if text}, tell)

    def _untold(self, why: str) -> None:
        now = self._ctx.now()
        if self._untold_at is None or now - self._untold_at >= _QUIET_S:
            self._untold_at = now
            do = "see whether the collector runs, or leave out --otel-endpoint"
            self._ctx.log.warning("spans_not_exported", why=why, do=do)

    def delivered(self, command: Deliver) -> None:
        """Output came; its tokens are counted with the next `flush`."""
        num_tokens = command.num_tokens
        if not num_tokens:
            return
        self.num_tokens += num_tokens
        observe = self._ctx.metrics.observe
        if command.first:
            observe("mesh_time_to_first_token_seconds", command.since_s)
            return
        observe("mesh_inter_token_latency_seconds", command.since_s / num_tokens, num_tokens)

    def flush(self) -> None:
        if self.num_tokens:
            self._ctx.metrics.count("mesh_generation_tokens_total", self.num_tokens)
            self.num_tokens = 0

    def ended(self, end: End, names: RequestNames, status: int, track: CallTrack | None) -> None:
        """The one end of a request; `status` is the HTTP status for a failure."""
        metrics = self._ctx.metrics
        reason = end.finish_reason or (ABORT if end.failure is None else "error")
        metrics.count("mesh_requests_ended_total", reason=reason)
        metrics.count("mesh_prompt_tokens_total", end.num_prompt_tokens)
        metrics.count("mesh_cached_tokens_total", end.num_cached_tokens)
        metrics.observe("mesh_e2e_request_latency_seconds", end.elapsed_s)
        if end.num_output_tokens > 1:
            metrics.observe("mesh_request_stall_seconds", end.stall_s)
        # Whoever sends more than its part is counted: 128 samples of each of its calls would be as many lines.
        if end.failure is not None and end.failure.code != OVER_SHARE:
            self._ctx.log.warning(
                "request_failed",
                request_id=end.request_id,
                status=status,
                code=end.failure.code,
                error=end.failure.message,
                **names.fields(),
            )
        if track is not None:
            track.ended(end.request_id, end.sample)
        if end.sample is not None and 0 < self._slow_s <= end.elapsed_s:
            self._slow(end, end.sample, names, 0.0 if track is None else track.told.tokenize_s)

    def _slow(self, end: End, sample: SampleRecord, names: RequestNames, tokenize_s: float) -> None:
        attempts = sample.attempts
        # A request that failed early may have had none.
        first_token = {"first_token_s": round(sample.first_token_s, 3)} if sample.first_token_s >= 0 else {}
        stages = ("queue_s", "grant_s", "prefill_s", "transfer_s")
        self._ctx.log.warning(
            "slow_request",
            request_id=end.request_id,
            elapsed_s=round(end.elapsed_s, 3),
            tokenize_s=round(tokenize_s, 4),
            **{name: round(sum(getattr(one, name) for one in attempts), 4) for name in stages},
            **first_token,
            stall_s=round(end.stall_s, 3),
            attempts=1 + attempts[-1].attempt,
            decode=attempts[-1].scheduler,
            prefill=attempts[-1].prefill,
            **names.fields(),
        )
