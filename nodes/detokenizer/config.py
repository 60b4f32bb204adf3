"""What a detokenizer is told at its start."""

import msgspec


class DetokenizerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the core. Streams beyond `max_streams` are dropped, idle ones first; they can be opened again.

    `max_ended_streams` ended ones are kept to answer repeats. A gap, an unknown stream or a stream that should stop is
    mentioned to its scheduler at most every `resend_interval_s`. A stream that nothing comes for is kept `lease_s`: its
    scheduler's word to forget it may be lost, and if it does go on it is opened again.
    """

    max_streams: int = 65_536
    max_ended_streams: int = 4096
    resend_interval_s: float = 0.1
    lease_s: float = 8.0


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model` as for `--model`. Draining ends when no tokens have come for `drain_quiet_s`.

    `use_threads` false: everything on the event loop, for the simulation.
    """

    model: str
    limits: DetokenizerLimits = DetokenizerLimits()
    drain_quiet_s: float = 0.5
    use_threads: bool = True
