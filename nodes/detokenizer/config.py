"""The configuration that a detokenizer gets at its start."""

import msgspec


class DetokenizerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the core. Streams beyond `max_streams` are dropped, idle ones first; they can be opened again.

    A gap, an unknown stream or a stream that should stop is reported to its scheduler. A stream that gets nothing is
    forgotten: the scheduler's message that closes it may be lost, and if the stream does go on it is opened again.
    """

    max_streams: int = 65_536
    """Streams known."""
    max_ended_streams: int = 4096
    """Ended ones kept for repeats."""
    resend_interval_s: float = 0.1
    """Between two reports of one gap."""
    lease_s: float = 8.0
    """Without tokens, after which a stream is forgotten."""


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One detokenizer of `model`. All `_s` are seconds."""

    model: str
    limits: DetokenizerLimits = DetokenizerLimits()
    drain_quiet_s: float = 0.5
    """Without tokens, after which draining ends."""
    use_threads: bool = True
    """Without: all on the event loop, for simulations."""
