"""One stream of a detokenizer: from tokens to deltas. Pure; owned by `nodes/detokenizer/core.py`."""

from collections.abc import Sequence
from itertools import repeat

from nodes.detokenizer.incremental import TokenDecoder
from nodes.detokenizer.stop_strings import StopMatcher, compile_stops
from nodes.protocol import StreamOpen, TextDelta

NEVER = float("-inf")


class Stream:
    """Decode state of one attempt. The owner checks positions; `position` is the next output position to take.

    `plain_position` equals it while one more token needs no special care (open, replayed, no stop strings), else -1.
    """

    __slots__ = (
        "_context", "_decoder", "_extras", "_matcher", "_min_tokens", "_num_cached_tokens", "_stages", "_text",
        "_text_offset", "_token_ids", "asked_at", "attempt", "finish_reason", "gateway", "last", "plain_position",
        "position", "request_id", "touched_at",
    )  # fmt: skip

    def __init__(self, opening: StreamOpen, decoder: TokenDecoder, now: float) -> None:
        rules = opening.stop
        self.request_id = opening.request_id
        self.attempt = opening.attempt
        self.gateway = opening.gateway
        self.position = 0
        self.plain_position = -1
        self.finish_reason: str | None = None
        self.last: TextDelta | None = None
        """The final delta, once it has been made."""
        self.touched_at = now
        self.asked_at = NEVER
        """When the scheduler was last asked to send again, or to stop."""
        self._context: list[int] | None = opening.output_ids
        self._decoder = decoder
        stops = tuple(stop for stop in rules.stop if stop)
        self._matcher = StopMatcher(compile_stops(stops), rules.include_stop) if stops else None
        self._min_tokens = rules.min_tokens
        self._num_cached_tokens = opening.num_cached_tokens
        # Sent once, with the first delta: there is no use in repeating it.
        self._stages = opening.stages
        self._text_offset = 0
        self._token_ids: list[int] = []
        self._extras: list[bytes] = []
        self._text: list[str] = []

    def begin(self, position: int) -> None:
        """Decode silently what was delivered before, up to `position`. Only the first call does anything."""
        if self._context is None:
            return
        context, self._context = self._context[:position], None
        self.take(context)
        self._text_offset += sum(map(len, self._text))
        self._token_ids, self._extras, self._text = [], [], []
        if self._matcher is None:
            self.plain_position = self.position

    def show_one(self, token_id: int, scheduler: str, extras: list[bytes]) -> TextDelta:
        """Take the token at `plain_position`, and its extra value if there is one; returns its delta."""
        position, offset = self.position, self._text_offset
        text = self._decoder.push(token_id)
        self.position = self.plain_position = position + 1
        self._text_offset = offset + len(text)
        return TextDelta(
            self.request_id, self.attempt, position, [token_id], offset, text, None, self._num_cached_tokens, scheduler,
            None, extras,
        )  # fmt: skip

    def take(self, token_ids: list[int], extras: Sequence[bytes] = (), hidden_at: int = -1) -> None:
        """Take the next tokens, up to a stop string; the token at output position `hidden_at` has no text.

        `extras` go beside them, if there are any.
        """
        decoder, matcher = self._decoder, self._matcher
        for token_id, extra in zip(token_ids, extras or repeat(b""), strict=False):
            text = "" if self.position == hidden_at else decoder.push(token_id)
            self.position += 1
            self._token_ids.append(token_id)
            self._extras.append(extra)
            if matcher is None:
                self._text.append(text)
                continue
            text, found = matcher.feed(text, armed=self.position > self._min_tokens)
            self._text.append(text)
            if found:
                self._end("stop")
                return
        if self.plain_position >= 0:
            self.plain_position = self.position

    def finish(self, reason: str) -> None:
        """No more tokens: show what was held back."""
        text = self._decoder.flush()
        if self._matcher is not None:
            text, found = self._matcher.feed(text, armed=self.position > self._min_tokens)
            reason = "stop" if found else reason
            text += self._matcher.flush()
        self._text.append(text)
        self._end(reason)

    def delta(self, scheduler: str) -> TextDelta | None:
        """What came since the last delta; None if nothing did, or the final one has been made."""
        if self.last is not None or (not self._token_ids and self.finish_reason is None):
            return None
        text, offset, token_ids = "".join(self._text), self._text_offset, self._token_ids
        self._text_offset += len(text)
        extras = self._extras if any(self._extras) else []
        self._token_ids, self._extras, self._text = [], [], []
        delta = TextDelta(
            self.request_id, self.attempt, self.position - len(token_ids), token_ids, offset, text,
            self.finish_reason, self._num_cached_tokens, scheduler, self._stages, extras,
        )  # fmt: skip
        self._stages = None
        if self.finish_reason is not None:
            self.last = delta
        return delta

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.plain_position = -1
