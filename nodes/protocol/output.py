"""From scheduler through detokenizer to gateway: tokens, then text."""

from mesh.wire.message import HotMessage, HotPart, Message
from nodes.request import AttemptRef, Stages, StopRules


class StreamOpen(HotPart, frozen=True):
    """Opens a stream at a detokenizer, or opens it again: any earlier state under this stream number is dropped.

    `prompt_tail` is the last few prompt ids, which some tokenizers need to decode the first output token.
    `output_ids` are outputs already delivered (by earlier attempts, or before this re-open). They are decoded silently,
    so that text offsets continue from there; the stream's next tokens begin no later than at `len(output_ids)`.
    `shown_ids` as in `RequestSpec`.
    """

    stream: int
    request_id: str
    attempt: int
    gateway: str
    stop: StopRules
    prompt_tail: list[int]
    output_ids: list[int]
    num_cached_tokens: int = 0
    skip_special_tokens: bool = True
    stages: Stages | None = None
    shown_ids: list[int] = []


class StreamFinish(HotPart, frozen=True):
    """The stream has ended with `position` output tokens; reason `stop` or `length`.

    Sent in the batch that carries the last token. Reason `stop` says that the last token is an end or stop token: its
    id is delivered, its text is not shown.
    """

    stream: int
    position: int
    reason: str


class TokenBatch(HotMessage, frozen=True):
    """One step's tokens, columnar: stream `streams[i]` gets `counts[i]` tokens from output position `positions[i]` on.

    `extras[i]` accompanies `token_ids[i]` (empty: none); the list is empty if no token has one.
    `opens` come first, then tokens, then `finishes`, then `closes` (streams to forget without an end).
    A stream number is unique within (sender, sender epoch).
    """

    streams: list[int]
    positions: list[int]
    counts: list[int]
    token_ids: list[int]
    opens: list[StreamOpen] = []
    finishes: list[StreamFinish] = []
    closes: list[int] = []
    extras: list[bytes] = []


class TextDelta(HotPart, frozen=True):
    """New output of one request: tokens from output position `position`, text from character `text_offset`.

    Text may lag behind tokens (incomplete UTF-8, a possible stop string). `finish_reason` is `stop` or `length`, set
    on the last delta only, whose text is then complete; `position + len(token_ids)` then counts all output tokens.
    Text sent again (after a re-open) is the same at the same offsets. The first delta after an open has the open's
    `stages`. `extras[i]` accompanies `token_ids[i]`, as in `TokenBatch`. `stop_string`, with the last delta: the stop
    string that ended the text, if one did. `num_past`, of requests with stop strings: so many of the last output tokens
    begin where the text so far ends, or later: it is held back, or was cut off with the stop string.
    """

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    text_offset: int
    text: str
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    scheduler: str = ""
    stages: Stages | None = None
    extras: list[bytes] = []
    stop_string: str = ""
    num_past: int = 0


class TextBatch(HotMessage, frozen=True):
    """All deltas of one step for one gateway."""

    deltas: list[TextDelta]


class StopAt(Message, frozen=True):
    """Stop strings were found: end these attempts as finished. Tell, detokenizer -> scheduler.

    Repeated while tokens still come. The gateway already knows of the finish and shows nothing after it. An unknown or
    ended attempt is ignored.
    """

    attempts: list[AttemptRef]
