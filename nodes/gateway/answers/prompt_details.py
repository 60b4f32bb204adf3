"""What an answer says of its prompts: their text (`echo`), and how likely each of their tokens was. Pure."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodes.asks.logprobs import Likelihoods, MalformedPayload
from nodes.gateway.jobs.validation import Job
from nodes.gateway.requests.events import ABORT
from nodes.gateway.requests.outputs import Generation

_DECODER: Final = getincrementaldecoder("utf-8")


class PromptToken(NamedTuple):
    """A token of the prompt, and how likely others would have been in its place."""

    token_id: int
    logprob: float
    rank: int
    likely: list[tuple[int, float]]


class PromptDetails:
    """Details that `job` asks for; `texts` are those of its prompts if it wants an echo."""

    def __init__(self, job: Job, generation: Generation, texts: Sequence[str] = ()) -> None:
        fields = job.tokens
        self._texts = texts if fields.echo else ()
        self._samples_per_prompt = generation.samples_per_prompt
        self._prompts = generation.prompts
        self._output = generation.output
        self._likelihoods = None if fields.prompt_reads is None else Likelihoods(fields.prompt_reads)
        self.echoed_top = 0 if fields.reads is None else fields.reads.top
        # None: not to be shown by themselves.
        self.shown_top = fields.prompt_logprobs

    @property
    def is_echoed(self) -> bool:
        return bool(self._texts)

    def text_of(self, number: int) -> str:
        """What stands before the output of a sample."""
        return self._texts[number // self._samples_per_prompt] if self._texts else ""

    def ids_of(self, number: int) -> list[int]:
        return self._prompts[number]

    def read(self, number: int, top: int) -> list[PromptToken]:
        """The tokens of a sample's prompt but the first, with `top` others each; none if it was aborted before it was
        read. Raises MalformedPayload.
        """
        if self._likelihoods is None or self._was_aborted_before(number):
            return []
        payload, following, size = self._output.prompt_of(number), self._prompts[number][1:], self._likelihoods.size
        if len(payload) != size * len(following):
            raise MalformedPayload(f"{len(payload)} bytes for {len(following)} tokens of a prompt")
        found: list[PromptToken] = []
        for at, token_id in enumerate(following):
            logprob, rank, likely = self._likelihoods.read_ranked(payload[at * size : (at + 1) * size])
            found.append(PromptToken(token_id, logprob, rank, likely[:top]))
        return found

    def _was_aborted_before(self, number: int) -> bool:
        end = self._output.samples[number].end
        return end is not None and end.finish_reason == ABORT and not self._output.prompt_of(number)


def offsets_in(text: str, pieces: Iterable[bytes]) -> list[int]:
    """Where each token begins in the text of its prompt, in characters.

    A token that the text does not show, as one that begins every prompt, takes no room in it, nor does the space that
    some tokenizers put before the first word.
    """
    decoder, offset, offsets = _DECODER("replace"), 0, list[int]()
    for piece in pieces:
        offsets.append(offset)
        shown = decoder.decode(piece)
        if text.startswith(shown, offset):
            offset += len(shown)
        elif shown[:1] == " " and text.startswith(shown[1:], offset):
            offset += len(shown) - 1
    return offsets
