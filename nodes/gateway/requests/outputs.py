"""Output of one HTTP call that has come and has not been written to its client yet.

The mesh pushes into it and never waits: a slow reader takes at most the memory of what its requests may generate, and
delays nobody else.

    news --flush--> the connection                    while the client keeps up: no task has to run for a token
             `----> the writer, a task that waits     if the client lags, the call ends, or nothing writes through (yet)

The one writer takes all there is, so tokens that came while it was busy go out in one piece.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from nodes.gateway.requests.events import ABORT, End, Failure, Opened, Tokens


class Piece(NamedTuple):
    """News of one sample: its text since the last piece, and its end if this is the last.

    `tokens` since the last piece, if the call shows any of them; those whose text is held back come with it.
    """

    number: int
    text: str
    end: End | None
    tokens: Tokens | None = None


class SampleOutput:
    """One sample: text and tokens not taken yet, the number of tokens and of cached ones of its prompt, and its end."""

    __slots__ = (
        "end",
        "is_accepted",
        "is_news",
        "num_cached_tokens",
        "num_restored_tokens",
        "num_tokens",
        "prompt",
        "texts",
        "tokens",
        "vector",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: Tokens | None = None
        self.num_tokens = 0
        self.num_cached_tokens = self.num_restored_tokens = 0
        self.end: End | None = None
        self.is_accepted = False
        self.is_news = False
        # What was read of its prompt, which is known of the first sample of each prompt alone.
        self.prompt: bytes | None = None
        # If it ends with a vector: as it was told.
        self.vector: bytes | None = None


class CallOutput:
    """All samples of one call. With `whole` the writer is woken for the end only, not for text.

    After `write_through`, `flush` has to be called whenever news came; before it, all news wakes the writer.
    With `samples_per_read` the prompt of so many samples is read by the first of them, and none of them has news before
    that is there: it is part of what the first piece shows. With `hides_output`, output is neither shown nor counted.
    """

    def __init__(self, num_samples: int, *, whole: bool, samples_per_read: int = 0, hides_output: bool = False) -> None:
        self.samples = [SampleOutput() for _ in range(num_samples)]
        self.failure: Failure | None = None
        self.is_gone = False
        self._whole = whole
        self._samples_per_read = samples_per_read
        self._hides_output = hides_output
        self._news: list[int] = []
        self._num_accepted = 0
        self._num_open = num_samples
        self._waiter: asyncio.Future[None] | None = None
        self._write: Callable[[], bool] | None = None

    @property
    def is_started(self) -> bool:
        """Every sample is held by a scheduler (or has ended): the answer can begin."""
        return self._num_accepted >= len(self.samples) or self._num_open == 0

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    @property
    def is_finished(self) -> bool:
        """Nothing more will come: all samples ended, one failed, or the client is gone."""
        return self._num_open == 0 or self.failure is not None or self.is_gone

    def accepted(self, index: int) -> None:
        """A scheduler holds the sample; told again after each retry."""
        sample = self.samples[index]
        if not sample.is_accepted:
            sample.is_accepted = True
            self._num_accepted += 1
            # The status line can go out now: until schedulers have all samples, the answer may need another status.
            if self.is_started and not self._whole:
                self._wake()

    def deliver(
        self, index: int, text: str, num_tokens: int, num_cached_tokens: int = 0, tokens: Tokens | None = None
    ) -> bool:
        """New output of a sample; `num_cached_tokens` of its prompt were cached. True if a flush has to follow."""
        sample = self.samples[index]
        if self._hides_output:
            sample.num_cached_tokens = num_cached_tokens
            return False
        if tokens is not None:
            # They leave with the next text: by themselves they are no news.
            ids, extras, _ = sample.tokens or Tokens([], [])
            ids.extend(tokens.ids)
            extras.extend(tokens.extras)
            sample.tokens = Tokens(ids, extras, tokens.num_past)
        sample.num_tokens += num_tokens
        sample.num_cached_tokens = num_cached_tokens
        if text:
            sample.texts.append(text)
            return (not self._samples_per_read or self._is_shown(index)) and self._note(index)
        return False

    def restored(self, index: int, num_tokens: int) -> None:
        """So many of the cached tokens of a sample's prompt were read from a disk."""
        self.samples[index].num_restored_tokens = num_tokens

    def deliver_prompt(self, index: int, payload: bytes) -> bool:
        """What was read of the prompt of this sample and those after it. True if a flush has to follow."""
        self.samples[index].prompt = payload
        held = range(index, index + self._samples_per_read)
        is_news = [self._note(one) for one in held if self.samples[one].texts or self.samples[one].end is not None]
        return any(is_news)

    def deliver_vector(self, index: int, vector: bytes, num_cached_tokens: int) -> None:
        """The vector of a sample, whose end follows."""
        sample = self.samples[index]
        sample.vector, sample.num_cached_tokens = vector, num_cached_tokens

    def prompt_of(self, index: int) -> bytes:
        """What was read of the prompt of a sample that has news."""
        return self.samples[index - index % self._samples_per_read].prompt or b""

    def _is_shown(self, index: int) -> bool:
        per_read = self._samples_per_read
        return not per_read or self.samples[index - index % per_read].prompt is not None

    def _note(self, index: int) -> bool:
        """There is news of a sample. True if a flush has to follow."""
        sample = self.samples[index]
        if sample.is_news:
            return False
        sample.is_news = True
        self._news.append(index)
        if self._write is not None:
            return True
        if not self._whole:
            self._wake()
        return False

    def end(self, index: int, end: End) -> None:
        sample = self.samples[index]
        is_aborted = end.finish_reason == ABORT
        if self._hides_output and end.finish_reason is not None and not is_aborted:
            # Whatever was drawn: none of it was asked for.
            end = end._replace(finish_reason="length", stop=None)
        sample.end = end
        self._num_open -= 1
        # The first failure is the call's: later ones are mostly its other samples, ended because of the first.
        if end.failure is not None and self.failure is None:
            self.failure = end.failure
        is_shown = self._is_shown(index)
        if (end.failure is not None or is_aborted) and not is_shown:
            # Its prompt will not be read any more, so nothing can be shown after it; the end can.
            sample.texts, sample.tokens, is_shown = [], None, True
        if is_shown and not sample.is_news:
            sample.is_news = True
            self._news.append(index)
        if self.is_finished or not (self._whole or self._write is not None):
            self._wake()

    def write_through(self, write: Callable[[], bool] | None) -> None:
        """From now on `flush` has `write` take news at once. If it returns False (the client lags), the writer does.
        With None, the writer alone does again.

        What `write` raises is raised by the writer's `wait`.
        """
        self._write = write

    def flush(self) -> None:
        waiter = self._waiter
        # A writer that is busy, or about to run, takes this news too.
        if self._write is None or not self._news or waiter is None or waiter.done():
            return
        try:
            if not self._write():
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - one call's failure, which must not keep others from their output
            waiter.set_exception(error)

    def gone(self) -> None:
        self.is_gone = True
        self._wake()

    async def wait(self) -> None:
        """Return when there is news, or with `whole` when all is there. One writer only; may return early."""
        if self.is_finished or (self._news and not self._whole):
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[Piece]:
        pieces: list[Piece] = []
        for index in self._news:
            sample = self.samples[index]
            texts = sample.texts
            text = texts[0] if len(texts) == 1 else "".join(texts)
            tokens, sample.tokens = _cut(sample.tokens, sample.end)
            pieces.append(Piece(index, text, sample.end, tokens))
            sample.texts = []
            sample.is_news = False
        self._news = []
        return pieces

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _cut(tokens: Tokens | None, end: End | None) -> tuple[Tokens | None, Tokens | None]:
    """The tokens of a piece, and those that wait for their text."""
    if tokens is None or not tokens.num_past:
        return tokens, None
    if end is not None:
        # Without a stop string nothing was cut off; the text of what was aborted is only not certain yet.
        return (tokens if isinstance(end.stop, str) else tokens._replace(num_past=0)), None
    ids, extras, num_past = tokens
    num = max(0, len(ids) - num_past)
    return Tokens(ids[:num], extras[:num]), Tokens(ids[num:], extras[num:], num_past)


class Generation:
    """One call's requests under way, in the order of the answer's choices."""

    def __init__(self, requests: list[Opened], output: CallOutput, num_prompts: int) -> None:
        self.request_ids = [request.request_id for request in requests]
        self.output = output
        self.samples_per_prompt = len(requests) // num_prompts
        self.prompts = [request.prompt_ids for request in requests]
        self.num_prompt_tokens = [len(prompt) for prompt in self.prompts]
