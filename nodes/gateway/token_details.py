"""What an answer says of its tokens beside their text: ids, logprobs, the prompt's ids. Pure; one for each call."""

from codecs import getincrementaldecoder
from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from nodes.asks.logprobs import Likelihoods, MalformedPayload
from nodes.gateway.events import Tokens
from nodes.gateway.outputs import Generation
from nodes.gateway.validation import Job
from nodes.gateway.vocabulary import Vocabulary

_DECODER: Final = getincrementaldecoder("utf-8")


class Drawn(NamedTuple):
    """A token of the output, and how likely others would have been in its place."""

    token_id: int
    logprob: float
    likely: list[tuple[int, float]]


class TokenDetails:
    """Details that `job` asks for; `vocabulary` is needed for logprobs alone."""

    def __init__(self, job: Job, generation: Generation, vocabulary: Vocabulary | None = None) -> None:
        fields = job.tokens
        self._shows_ids = fields.ids
        self._as_ids = fields.as_ids
        self._prompts = generation.prompts if fields.prompt_ids else None
        self._likelihoods = None if fields.reads is None else Likelihoods(fields.reads)
        self._vocabulary = vocabulary or Vocabulary()
        ends = () if job.stop.ignore_eos else self._vocabulary.end_token_ids
        self._ends = frozenset((*ends, *job.stop.stop_token_ids))

    @property
    def is_plain(self) -> bool:
        """Whether chunks show text alone."""
        return not self._shows_ids and self._likelihoods is None and self._prompts is None

    @property
    def reads_logprobs(self) -> bool:
        return self._likelihoods is not None

    def ids_of(self, tokens: Tokens | None) -> list[int] | UnsetType:
        """The ids to show with a piece; UNSET if none are to be shown."""
        if not self._shows_ids:
            return UNSET
        return [] if tokens is None else tokens.ids

    def prompt_ids_of(self, number: int) -> list[int] | UnsetType:
        """The prompt of a sample; UNSET if it is not to be shown."""
        return UNSET if self._prompts is None else self._prompts[number]

    def drawn(self, tokens: Tokens | None) -> list[Drawn]:
        """The tokens of a piece with what was read beside them. Raises MalformedPayload."""
        if tokens is None or self._likelihoods is None:
            return []
        ids, extras = tokens
        if len(ids) != len(extras):
            raise MalformedPayload(f"logprobs came with {len(extras)} of {len(ids)} tokens")
        read = self._likelihoods.read
        return [Drawn(token_id, *read(extra)) for token_id, extra in zip(ids, extras, strict=True)]

    def ends_hidden(self, tokens: Tokens | None, finish_reason: str | None) -> bool:
        """Whether the last token of a piece ended the text and is not part of it."""
        return finish_reason == "stop" and tokens is not None and bool(tokens.ids) and tokens.ids[-1] in self._ends

    def name(self, token_id: int) -> str:
        """How answers call a token: its text, where bytes of an incomplete character are U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.data_of(token_id).decode(errors="replace")

    def data_of(self, token_id: int) -> bytes:
        return self._vocabulary.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._vocabulary.bytes_of(token_id))


class TextOffsets:
    """Where each token of one text begins, in characters; one that begins inside a character, at that character."""

    __slots__ = ("_decoder", "_num_chars")

    def __init__(self) -> None:
        self._decoder = _DECODER("replace")
        self._num_chars = 0

    def next(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return offset
