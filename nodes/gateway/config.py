"""Settings of one gateway, made by `cli` from the topology: where it listens, what it serves, every limit it keeps."""

from typing import Literal

import msgspec

from nodes.asks import LogprobsOf
from nodes.context_length import ServedContext
from nodes.gateway.clients import read_networks
from nodes.gateway.parsers import ParserUnusable, check_names
from nodes.model_spec import Quantization
from nodes.models.fill_in import FillIn
from nodes.models.pooling import Pooling
from nodes.request import SamplingDefaults

_GIVEN = {
    "embedding": "embeddings: ask /v1/embeddings, /score or /rerank",
    "classify": "classes: ask /classify",
    "score": "scores: ask /score, /rerank or /classify",
    "yes_no": "scores: ask /score, /rerank or /classify",
}


RequestLog = Literal["all", "slow", "errors", "none"]
"""Which calls get a line in the request log."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway. All `_s` are seconds; every limit has a defined answer for when it is reached.

    `model` says what is served (a directory, or a name such as `echo`), `model_name` is what clients ask for; they may
    ask for one of `aliases` as well. `sampling_defaults` apply where a request does not say how it is sampled.
    `logprobs_of` is whose logprobs are answered: the model's own, or of what edits and temperature made of it.
    `quantization` is what weights are rounded to. `context` tells people how `context_length` was chosen.
    `fill_in` are the tokens by which the model takes a `suffix` (None: it does not), `template_reads` the variables of
    its chat template that requests have fields for. `pooling` is how the model makes vectors (None: it makes none), of
    `hidden_size` numbers unless the pooling says otherwise. `makes_text` is false if it makes nothing else.
    Responses are kept in `responses_file`, one for all gateways of a host, up to `responses_store_bytes`; 0: none is.
    `vocab_size` 0 means unknown: token ids are then checked by the tokenizer only. A scheduler that dies is given
    `reconnect_grace_s` to return to the KV that it has computed, before its requests are computed again elsewhere. The
    log says where the time of a slow request went. In `request_log_folder` ("": nowhere) a file gets a line for each
    call that `request_log` names, up to `request_log_bytes` and as much again.
    To `otel_endpoint` ("": nowhere) the spans of calls go, by OTLP over HTTP.
    `api_key_file` is the file of the API keys that clients must send (`nodes/api_keys/`), "": none are asked for.
    With `control`, admin keys may have the mesh changed: its caches flushed, its memory released.
    Without `page` there is no page at `/`, and no events for it.
    `cors_origins` are the origins whose pages may call this gateway from a browser (`*`: all), none by default.
    Clients without a key are told apart by their address, under a hash with `client_salt`, which all gateways of a mesh
    have in common; from `trusted_proxies` (addresses, networks) the address is that which `X-Forwarded-For` names.
    `tool_call_parser` and `reasoning_parser` name what reads calls and reasoning in answers: by default what fits the
    model's chat template; `none`: nothing. Raises ValueError for a parser that is not there, and for `control` without
    keys.
    """

    model_name: str
    context_length: int
    context: ServedContext | None = None
    model: str = ""
    quantization: Quantization = "none"
    vocab_size: int = 0
    fill_in: FillIn | None = None
    template_reads: tuple[str, ...] = ()
    pooling: Pooling | None = None
    makes_text: bool = True
    hidden_size: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    client_salt: str = ""
    api_key_file: str = ""
    control: bool = False
    page: bool = True
    request_log: RequestLog = "all"
    """Which calls get a line in the request log: `all`, `slow`, `errors`, `none`."""
    request_log_folder: str = ""
    request_log_bytes: int = 16 << 20
    """Size of the request log."""
    otel_endpoint: str = ""
    aliases: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    logprobs_of: LogprobsOf = "raw"
    responses_file: str = ""
    responses_store_bytes: int = 0
    tool_call_parser: str = ""
    reasoning_parser: str = ""

    max_body_bytes: int = 8 << 20
    """Bytes of one request."""
    max_buffered_bytes: int = 256 << 20
    """Bytes of all bodies that arrive or wait to be decoded."""
    max_inflight: int = 2048
    """Calls at work at once; more are refused."""
    max_connections: int = 16384
    """Connections of clients at once."""
    max_samples_per_call: int = 128
    """Most samples, `n`."""
    max_prompts_per_call: int = 128
    """Most prompts in a list."""
    max_inputs_per_call: int = 2048
    """Texts of one call that become vectors."""
    body_timeout_s: float = 30.0
    """In which a body has to be there."""
    body_pause_s: float = 10.0
    """Over each such pause a body arrives at `min_body_bytes_per_s` or more, on average."""
    min_body_bytes_per_s: int = 1024
    """Slowest body, in bytes a second."""

    prepare_timeout_s: float = 5.0
    role_wait_s: float = 15.0
    cancel_timeout_s: float = 2.0
    """Until a scheduler that was asked to cancel is asked again."""
    scrape_timeout_s: float = 1.0
    """In which actors answer for `/metrics`; the others are left out."""
    request_timeout_s: float = 3600.0
    slow_request_s: float = 30.0
    """From which a call is slow; 0: never."""
    slow_first_token_s: float = 10.0
    """Up to the first token, from which a call is slow; 0: never."""
    health_timeout_s: float = 20.0
    """For which `/health/generate` waits for its token."""
    memory_timeout_s: float = 120.0
    """In which memory has to be released or resumed for those who ask over HTTP."""
    retry_after_s: int = 1
    """What `Retry-After` says."""

    quiet_s: float = 1.0
    """Silence after which missing output is asked for."""
    max_attempts: int = 5
    """Failed attempts after which a request fails."""
    recovery_timeout_s: float = 30.0
    """In which a request that lost its scheduler finds another one."""
    reconnect_grace_s: float = 1.0

    def __post_init__(self) -> None:
        if self.control and not self.api_key_file:
            raise ValueError("control needs an api_key_file with an admin key: anybody could change the mesh")
        # Raises ValueError for what is no address.
        read_networks(self.trusted_proxies)
        try:
            check_names(self.tool_call_parser, self.reasoning_parser)
        except ParserUnusable as error:
            raise ValueError(str(error)) from None

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model; the first is the one that answers carry."""
        return (self.model_name, *self.aliases)

    @property
    def taken_names(self) -> tuple[str, ...]:
        """What `model` of a body may be. SGLang's router writes `unknown` where its client has named none."""
        return (*self.served_names, "unknown")

    @property
    def gives(self) -> str:
        """What the model's vectors are, and the routes that have them."""
        return "no vectors" if self.pooling is None else _GIVEN[self.pooling.kind]

    @property
    def longest_input(self) -> int:
        """How many tokens a prompt that becomes a vector may have: all of the context, unless the model says less."""
        most = 0 if self.pooling is None else self.pooling.max_length
        return min(most or self.context_length, self.context_length)
