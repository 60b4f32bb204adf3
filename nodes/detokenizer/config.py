"""The configuration that a detokenizer gets at its start."""

import msgspec


class DetokenizerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the core. Streams beyond `max_streams` are dropped, idle ones first; they can be opened again.

    `max_ended_streams` ended ones are kept to answer repeats. A gap, an unknown stream or a stream that should stop is
    reported to its scheduler at most every `resend_interval_s`. A stream that gets nothing is forgotten after
    `lease_s`: the scheduler's message that closes it may be lost, and if the stream does go on it is opened again.
    """

    max_streams: int = 65_536
    max_ended_streams: int = 4096
    resend_interval_s: float = 0.1
    lease_s: float = 8.0


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Draining ends after `drain_quiet_s` without tokens. `use_threads` false: on the event loop, for simulation."""

    model: str
    limits: DetokenizerLimits = DetokenizerLimits()
    drain_quiet_s: float = 0.5
    use_threads: bool = True
