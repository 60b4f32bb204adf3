"""Applies a step's result: progress of each row, tokens to their streams, ended sequences, pages given back.

It also applies the end of a handoff, which is the result of steps elsewhere. It runs for every row of every step, so it
is written for speed. Pure; owned by the core.
"""

from nodes.protocol import RowError
from nodes.protocol.steps import RowColumn
from nodes.scheduler.batch.step import Acknowledged
from nodes.scheduler.books import Books
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.sequence import Sequence, Stage

POISONED = "poisoned_request"
"""Codes of rows that would fail at any other worker too."""


class Results:
    """Applies acknowledged steps."""

    def __init__(self, books: Books, orders: PrefillHandoffQueue, streams: Streams, endings: Endings) -> None:
        self._books = books
        self._orders = orders
        self._streams = streams
        self._endings = endings
        # Sequences with new tokens, until these are told: all that one message brings of a sequence goes together.
        self._drawn: dict[int, Sequence] = {}
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_vectors = 0

    def acknowledge(self, acknowledged: Acknowledged, now: float) -> None:
        """Take in one step. `tell` has to follow."""
        has_room, page_size = False, self._books.config.page_size
        step, token_ids, errors, extras, prompt_extras, vectors = acknowledged
        starts, counts, draws = (step.column(column) for column in (RowColumn.START, RowColumn.COUNT, RowColumn.DRAWS))
        drawn: list[Sequence] = []
        rows = zip(step.sequences, starts, counts, draws, token_ids, strict=True)
        for index, (sequence, start, count, draw, token_id) in enumerate(rows):
            sequence.num_inflight -= 1
            if sequence.num_deaths:
                sequence.survived(draw)
            if errors and index in errors:
                self._on_error(sequence, errors[index], now)
                has_room = True
            else:
                end = sequence.num_computed = start + count
                self.num_computed_tokens += count
                if end >= sequence.commit_at:
                    sequence.commit_full_pages(page_size)
                    # More of a prompt is cached, for which others may be waiting.
                    has_room |= count > 1
                if sequence.stage is Stage.ENDED:
                    pass
                elif sequence.order_id:
                    self._progress(sequence, token_id, extras[index] if extras else b"", now)
                elif draw:
                    drawn.append(sequence)
                    if extras:
                        sequence.take_token(token_id, extras[index])
                    else:
                        sequence.token_ids.append(token_id)
            if not sequence.num_inflight and sequence.stage >= Stage.PREEMPTED:
                has_room = True
                self.settle(sequence)
        for index, payload in enumerate(prompt_extras):
            sequence = step.sequences[index]
            if payload and index not in errors and sequence.stage is not Stage.ENDED:
                self._streams.read(sequence, starts[index], counts[index], payload)
        for index, vector in enumerate(vectors):
            sequence = step.sequences[index]
            if vector and index not in errors and sequence.stage is not Stage.ENDED:
                self._pool(sequence, starts[index] + counts[index], vector, now)
        # After that: a gateway takes no output before it has what was read.
        self.draw(drawn, now)
        self._books.is_admission_due |= has_room
        self._books.queue.shares.acknowledged()

    def _pool(self, sequence: Sequence, end: int, vector: bytes, now: float) -> None:
        """A row up to `end` has made the sequence's vector, or pooled some more for it."""
        if end == sequence.num_prompt_tokens:
            self.num_vectors += 1
            self._endings.finish_vector(sequence, vector, now)
        elif sequence.num_computed == end:
            # Of one that was preempted meanwhile nothing counts as computed: it begins again.
            sequence.pooled = vector

    def draw(self, sequences: list[Sequence], now: float) -> None:
        """Each of these has a new token, which is told by `tell`; a sequence whose last one it was ends."""
        self.num_output_tokens += len(sequences)
        ended: list[tuple[Sequence, str]] = []
        for sequence in sequences:
            tokens = sequence.token_ids
            # Two cheap tests for each row; which of them ended it is worked out only for the few that end.
            if tokens[-1] in sequence.stop_ids or len(tokens) >= sequence.max_length:
                ended.append((sequence, sequence.finish_reason_now()))
        self._drawn.update((one.row_id, one) for one in sequences)
        for sequence, reason in ended:
            # Its end takes along all that it has.
            del self._drawn[sequence.row_id]
            self._endings.finish(sequence, reason, now)

    def tell(self) -> None:
        """Send the tokens that were drawn since the last time."""
        drawn, self._drawn = self._drawn, {}
        # One that was ended by something else meanwhile has nobody who would read them.
        self._streams.tokens([one for one in drawn.values() if one.stage is not Stage.ENDED])

    def prefilled(self, sequence: Sequence, token_id: int, num_cached_tokens: int, extra: bytes, now: float) -> None:
        """Its prefill elsewhere is done: all pages are in and the first token is drawn."""
        self._handoff_over()
        if sequence.num_cached_tokens < 0:
            assert sequence.kv is not None, "the sequence holds the received pages"
            sequence.num_cached_tokens = max(sequence.kv.num_cached_tokens, num_cached_tokens)
        sequence.length += 1
        sequence.take_token(token_id, extra)
        self._books.running.enter(sequence)
        self.draw([sequence], now)
        self.tell()

    def not_prefilled(self, sequence: Sequence, code: str, message: str, now: float, *, complete: bool) -> None:
        """Its prefill elsewhere failed. `complete`: all pages are in nevertheless, and belong to the sequence again.

        `message` is what the prefill scheduler said, if it is the prefill that failed.
        """
        self._handoff_over()
        # Not tried elsewhere a second time: it is prefilled here, where no grant or peer can fail it.
        sequence.prefill = ""
        if code == POISONED:
            # Only for this code: any other failure lies with the other side, and the prompt may be computed here.
            sequence.stage = Stage.WAITING
            self._endings.fail(sequence, POISONED, message, retryable=False, now=now)
            return
        if not complete:
            self._books.put_back(sequence)
            return
        # Only the first token is missing: the last position is computed again for its logits.
        sequence.num_scheduled -= 1
        if sequence.num_cached_tokens < 0:
            assert sequence.kv is not None, "the sequence holds the received pages"
            sequence.num_cached_tokens = sequence.kv.num_cached_tokens
        self._books.running.enter(sequence)

    def _handoff_over(self) -> None:
        self._books.queue.shares.acknowledged()
        self._books.is_admission_due = True

    def _progress(self, sequence: Sequence, token_id: int, extra: bytes, now: float) -> None:
        """A chunk of a prompt that another scheduler ordered; `token_id` is -1 before the last one."""
        self._orders.on_computed(sequence, now)
        if token_id >= 0:
            self.num_output_tokens += 1
            self._books.running.retain(sequence)
            self._orders.on_token(sequence, token_id, extra, now)

    def settle(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.RETAINED:
            return
        self._books.running.settle(sequence)
        if sequence.stage is Stage.PREEMPTED:
            self._books.put_back(sequence)

    def _on_error(self, sequence: Sequence, error: RowError, now: float) -> None:
        """A row that could not be computed ends its sequence, and nothing else."""
        if sequence.stage is not Stage.ENDED:
            self._endings.end_badly(sequence, error.code, error.message, error.retryable, now)
