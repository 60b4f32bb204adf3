"""From a job and its prompts' token ids to requests: one for each sample of each prompt.

Pure. Randomness is keyed by (seed, sample index, position), so sample 0 is the same for every `n`, and a prompt
in a list gives the same as alone. A prompt that is read is read for its first sample: it is the same for all.
"""

from collections.abc import Sequence

import msgspec

from nodes.asks import Ask
from nodes.context_length import over_context
from nodes.gateway.clients import NOBODY, Client
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest, invalid
from nodes.gateway.jobs.validation import Job, asked_of
from nodes.gateway.requests.events import Opened
from nodes.protocol import Route
from nodes.request import TOKENS, RequestSpec


def _encoded(asks: Sequence[Ask], words: Sequence[list[int]]) -> list[Ask]:
    encoded: list[Ask] = []
    for ask in asks:
        num = len(ask.texts())
        encoded.append(ask.with_token_ids(list(words[:num])) if num else ask)
        words = words[num:]
    return encoded


def max_tokens_of(job: Job, num_prompt_tokens: int, config: GatewayConfig) -> int:
    """How many tokens a prompt's answer may have; raises `BadRequest` if the context has no room for them."""
    room = config.context_length - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise invalid(f"'{job.prompt_param}' has no tokens.", job.prompt_param)
    if job.kind != TOKENS:
        # Nothing is drawn, so the input may fill the context.
        if room < 0:
            raise _too_long(job, num_prompt_tokens, 0, config, job.prompt_param)
        return 1
    if room < 1:
        raise _too_long(job, num_prompt_tokens, 0, config, job.prompt_param)
    wanted = min(job.stop.max_tokens, room) if job.fits_max_tokens else job.stop.max_tokens
    if wanted > room:
        raise _too_long(job, num_prompt_tokens, wanted, config, job.max_tokens_param)
    if job.stop.min_tokens > room:
        raise _too_long(job, num_prompt_tokens, job.stop.min_tokens, config, "min_tokens")
    if wanted:
        return wanted
    return max(min(job.default_tokens or room, room), job.stop.min_tokens)


def _too_long(job: Job, num_prompt: int, num_output: int, config: GatewayConfig, param: str) -> BadRequest:
    message = over_context(config.context_length, job.prompt_param, num_prompt, num_output)
    return BadRequest(message, param=param, code="context_length_exceeded")


def fan_out(
    job: Job,
    prompts: Sequence[list[int]],
    routes: Sequence[Route],
    *,
    seed: int,
    arrived_at: float,
    config: GatewayConfig,
    words: Sequence[list[int]] = (),
    second_from: Sequence[int] = (),
    client: Client = NOBODY,
) -> list[Opened]:
    """Requests in the order of the answer's choices; `seed` is used if the client gave none.

    `words`: the token ids of the texts of the job's asks, in their order. `second_from`: as in `Prepared`. Raises
    `BadRequest`.
    """
    asks = asked_of(_encoded(job.asks, words))
    asks_of_others = [one for one in asks if not one.reads_prompt]
    sampling = msgspec.structs.replace(job.sampling, seed=seed if job.seed is None else job.seed)
    opened: list[Opened] = []
    for prompt_ids, route, second in zip(prompts, routes, second_from or [0] * len(prompts), strict=True):
        stop = msgspec.structs.replace(job.stop, max_tokens=max_tokens_of(job, len(prompt_ids), config))
        for sample_index in range(job.n):
            request = Opened(
                request_id=f"{job.prepare.request_id}-{len(opened)}",
                prompt_ids=prompt_ids,
                spec=RequestSpec(
                    sampling=msgspec.structs.replace(
                        sampling, sample_index=sample_index, asks=asks_of_others if sample_index else asks
                    ),
                    stop=stop,
                    priority=job.priority,
                    extra_key=job.prepare.extra_key,
                    skip_special_tokens=job.skip_special_tokens,
                    shown_ids=list(job.shown_ids),
                    kind=job.kind,
                    second_from=second,
                    client=client.name,
                    weight=client.weight,
                ),
                route=route,
                arrived_at=arrived_at,
                shows_tokens=job.tokens.of_output,
            )
            opened.append(request)
    return opened
