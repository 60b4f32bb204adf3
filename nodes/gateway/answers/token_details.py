"""What an answer says of its tokens beside their text: ids, logprobs, the prompt's ids. Pure; one for each call."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from nodes.asks.logprobs import Likelihoods, MalformedPayload
from nodes.gateway.answers.prompt_details import PromptDetails
from nodes.gateway.asked.vocabulary import Vocabulary
from nodes.gateway.fields.openai_types import DrawnTokenLogprob, PromptLogprob, PromptLogprobs, StopFound, TokenLogprob
from nodes.gateway.jobs.validation import Job
from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.requests.outputs import Generation

_DECODER: Final = getincrementaldecoder("utf-8")


class Drawn(NamedTuple):
    """A token of the output, and how likely others would have been in its place."""

    token_id: int
    logprob: float
    likely: list[tuple[int, float]]


class TokenDetails:
    """Details that `job` asks for; `vocabulary` is needed for logprobs alone, `texts` of the prompts for an echo."""

    def __init__(
        self, job: Job, generation: Generation, vocabulary: Vocabulary | None = None, texts: Sequence[str] = ()
    ) -> None:
        fields = job.tokens
        self.of_prompts = PromptDetails(job, generation, texts)
        self._shows_ids = fields.ids
        self._as_ids = fields.as_ids
        self._shows_stop = bool(job.stop.stop or job.stop.stop_token_ids)
        self._own_stop_ids = frozenset(job.stop.stop_token_ids)
        self._prompts = generation.prompts if fields.prompt_ids else None
        self._likelihoods = None if fields.reads is None else Likelihoods(fields.reads)
        self._vocabulary = vocabulary or Vocabulary()
        ends = () if job.stop.ignore_eos else self._vocabulary.end_token_ids
        self._ends = frozenset((*ends, *job.stop.stop_token_ids))

    @property
    def is_plain(self) -> bool:
        """Whether chunks show text alone."""
        is_alone = not self._shows_ids and self._likelihoods is None and self._prompts is None
        return is_alone and not self.of_prompts.is_echoed

    @property
    def reads_logprobs(self) -> bool:
        return self._likelihoods is not None

    def ids_of(self, tokens: Tokens | None) -> list[int] | UnsetType:
        """The ids to show with a piece; UNSET if none are to be shown."""
        if not self._shows_ids:
            return UNSET
        return [] if tokens is None else tokens.ids

    def stop_of(self, end: End | None) -> StopFound | None:
        """Which stop ended a sample; None before that, and for calls that name no stops of their own."""
        if end is None or not self._shows_stop:
            return None
        found = end.stop
        own = found if isinstance(found, str) or found in self._own_stop_ids else None
        return StopFound(stop_reason=own, matched_stop=found)

    def prompt_ids_of(self, number: int) -> list[int] | UnsetType:
        """The prompt of a sample; UNSET if it is not to be shown."""
        return UNSET if self._prompts is None else self._prompts[number]

    def prompt_logprobs_of(self, number: int) -> PromptLogprobs | UnsetType:
        """How likely a sample's prompt was, by token; UNSET if that is not to be shown. Raises MalformedPayload."""
        top = self.of_prompts.shown_top
        if top is None:
            return UNSET
        found: PromptLogprobs = [None]
        for token_id, logprob, rank, likely in self.of_prompts.read(number, top):
            own = PromptLogprob(logprob=logprob, rank=rank, decoded_token=self._text_of(token_id))
            others = {
                str(one): PromptLogprob(logprob=its, rank=at, decoded_token=self._text_of(one))
                for at, (one, its) in enumerate(likely, 1)
            }
            # Its own token first, as at vLLM, whether it is among the likeliest or not.
            found.append({str(token_id): own} | others)
        return found

    def drawn(self, tokens: Tokens | None) -> list[Drawn]:
        """The tokens of a piece with what was read beside them. Raises MalformedPayload."""
        if tokens is None or self._likelihoods is None:
            return []
        ids, extras, _ = tokens
        if len(ids) != len(extras):
            raise MalformedPayload(f"logprobs came with {len(extras)} of {len(ids)} tokens")
        read = self._likelihoods.read
        return [Drawn(token_id, *read(extra)) for token_id, extra in zip(ids, extras, strict=True)]

    def drawn_in_text(self, tokens: Tokens | None) -> list[Drawn]:
        """As `drawn`, without those of a stop string that ended the text. Raises MalformedPayload."""
        drawn = self.drawn(tokens)
        return drawn if tokens is None else drawn[: len(drawn) - tokens.num_past]

    def logprobs_of(self, tokens: Tokens | None, finish_reason: str | None) -> list[DrawnTokenLogprob]:
        """Of the tokens of a piece, without what ended the message. Raises MalformedPayload."""
        drawn = self.drawn_in_text(tokens)
        if self.ends_hidden(tokens, finish_reason):
            drawn.pop()
        return [
            DrawnTokenLogprob(
                token=self.name(token_id),
                logprob=logprob,
                bytes=self.bytes_of(token_id),
                top_logprobs=[
                    TokenLogprob(token=self.name(one), logprob=its, bytes=self.bytes_of(one)) for one, its in likely
                ],
            )
            for token_id, logprob, likely in drawn
        ]

    def ends_hidden(self, tokens: Tokens | None, finish_reason: str | None) -> bool:
        """Whether the last token of a piece ended the text and is not part of it, by its id."""
        if finish_reason != "stop" or tokens is None or tokens.num_past:
            return False
        return bool(tokens.ids) and tokens.ids[-1] in self._ends

    def name(self, token_id: int) -> str:
        """How answers call a token: its text, where bytes of an incomplete character are U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.data_of(token_id).decode(errors="replace")

    def _text_of(self, token_id: int) -> str:
        return self.data_of(token_id).decode(errors="replace")

    def data_of(self, token_id: int) -> bytes:
        return self._vocabulary.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._vocabulary.bytes_of(token_id))


class TextOffsets:
    """Where each token of one text begins, in characters; one that begins inside a character, at that character.

    `num_chars` are before it.
    """

    __slots__ = ("_decoder", "_num_chars")

    def __init__(self, num_chars: int = 0) -> None:
        self._decoder = _DECODER("replace")
        self._num_chars = num_chars

    def next(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return offset
