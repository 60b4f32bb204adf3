"""The configuration that a tokenizer gets at its start."""

import msgspec


class RenderingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one rendering of a chat template: time, and the address space of the process that does it."""

    deadline_s: float = 2.0
    """Of one chat template, or of compiling one schema; it is killed then."""
    start_timeout_s: float = 20.0
    memory_bytes: int = 1 << 30
    """Address space of the process that renders."""
    max_waiting: int = 1024
    """Templates that wait for it."""


class RoutingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is known for routing. All `_s` are seconds."""

    recent_s: float = 0.5
    """How long a choice counts against its scheduler before its load shows it."""
    max_pages: int = 262_144
    """Pages known of each scheduler's cache."""


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model` as for `--model`; `context_length` 0 is the model's own. `chat_template` is a file to use in place of
    the model's own template.
    """

    model: str
    context_length: int = 0
    inline_chars: int = 16_384
    """Longer texts are encoded in a thread."""
    max_long_texts: int = 64
    """Texts in that thread, running or waiting; more are refused."""
    max_counted_texts: int = 8
    """The same of texts that are only counted, in a thread of their own."""
    use_threads: bool = True
    """Without: all on the event loop, for simulations."""
    use_processes: bool = True
    """Without: no child renders or compiles, for simulations."""
    chat_template: str = ""
    rendering: RenderingLimits = RenderingLimits()
    routing: RoutingLimits = RoutingLimits()
