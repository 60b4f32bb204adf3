"""The configuration that a tokenizer gets at its start."""

import msgspec


class RenderingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one rendering of a chat template: time, and the address space of the process that does it."""

    deadline_s: float = 2.0
    start_timeout_s: float = 20.0
    memory_bytes: int = 1 << 30
    max_waiting: int = 1024


class RoutingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A choice counts against its scheduler for `recent_s`, until its load shows it. `max_pages`: of one index."""

    recent_s: float = 0.5
    max_pages: int = 262_144


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model` as for `--model`; `context_length` 0 is the model's own. `chat_template` is a file to use in place of
    the model's own template.

    Texts of more than `inline_chars` are encoded in a thread, with at most `max_long_texts` running or waiting; texts
    that are only counted have another thread, with at most `max_counted_texts`.
    `use_threads` and `use_processes` false: everything runs on the event loop, for the simulation.
    """

    model: str
    context_length: int = 0
    inline_chars: int = 16_384
    max_long_texts: int = 64
    max_counted_texts: int = 8
    use_threads: bool = True
    use_processes: bool = True
    chat_template: str = ""
    rendering: RenderingLimits = RenderingLimits()
    routing: RoutingLimits = RoutingLimits()
