"""What is counted and logged about requests: tokens and their pace, ends, slow ones. Owned by the service."""

import msgspec

from mesh.actor import Context
from nodes.gateway.events import Deliver, End, SlowRequest
from nodes.gateway.request_names import RequestNames
from nodes.protocol.attempts import OVER_SHARE


class RequestAccount:
    """Metrics and log lines of one gateway's requests."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.num_tokens = 0
        """Tokens delivered and not counted yet."""

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
        each_s = command.since_s / num_tokens
        for _ in range(num_tokens):
            observe("mesh_inter_token_latency_seconds", each_s)

    def flush(self) -> None:
        if self.num_tokens:
            self._ctx.metrics.count("mesh_generation_tokens_total", self.num_tokens)
            self.num_tokens = 0

    def ended(self, end: End, names: RequestNames, status: int) -> None:
        """The one end of a request; `status` is the HTTP status for a failure."""
        metrics = self._ctx.metrics
        reason = end.finish_reason or ("abort" if end.failure is None else "error")
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

    def slow(self, slow: SlowRequest, names: RequestNames) -> None:
        # A request that failed early may have had none.
        first_token = {"first_token_s": round(slow.first_token_s, 3)} if slow.first_token_s >= 0 else {}
        stages = {name: round(value, 4) for name, value in msgspec.structs.asdict(slow.stages).items()}
        self._ctx.log.warning(
            "slow_request",
            request_id=slow.request_id,
            elapsed_s=round(slow.elapsed_s, 3),
            tokenize_s=round(slow.tokenize_s, 4),
            **stages,
            **first_token,
            stall_s=round(slow.stall_s, 3),
            attempts=slow.num_attempts,
            decode=slow.route.decode,
            prefill=slow.route.prefill,
            **names.fields(),
        )
