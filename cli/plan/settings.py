"""What a user may set about a mesh, declared once each: the topology file, options, variables and pages follow. Pure.

The text below a field is what is said of it (`cli/plan/declared.py`). `cli/plan/sources.py` reads settings,
`cli/plan/topology.py` makes the list of actors from them.
"""

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import msgspec

from cli.errors import BadConfig
from cli.plan.declared import Shown
from cli.plan.hosts import Count, Device, HostName, HostSettings, mesh_groups, registry_host
from mesh.errors import TypedError
from nodes.asks import LogprobsOf
from nodes.gateway.clients import read_networks
from nodes.gateway.parsers import ParserUnusable, check_names
from nodes.model_spec import PoolingChoice, Quantization
from nodes.scheduler.config import StorePolicy

MAX_NAME_CHARS: Final = 200
"""A name is in every answer, and in each chunk of a stream; the longest of the hub have 96 characters."""

_CPU_CHUNK: Final = 256
_CPU_STEP_S: Final = 0.2
"""Room for one to four pages beside 16 rows of a model of 0.5 billion parameters on two cores (135 or 51 ms for the
rows, 2.6 or 1.9 ms a prompt token, by torch's kernels or native ones); steps of smaller models are full before."""
_DEVICE_CHUNK: Final = 2048
"""A device needs some thousand rows in a product to multiply at full speed."""

_AMOUNT: Final = r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)[Ii]?[Bb]?\s*"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=64)]
Several = Annotated[int, msgspec.Meta(ge=1, le=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
SomeSeconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOfTwo = Annotated[int, msgspec.Meta(ge=1, le=65534)]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9][a-z0-9-]{0,23}$",
        description="lower-case letters, digits and dashes, at most 24 (part of socket paths, which must be short)",
    ),
    Shown("MESH"),
]
_Amount = Annotated[
    str,
    msgspec.Meta(
        description="an amount of memory: a number followed by KiB, MiB, GiB or TiB, or by nothing for bytes",
        examples=["512MiB", "2GiB", "1048576"],
    ),
    Shown("BYTES"),
]
Bytes = Annotated[_Amount, msgspec.Meta(pattern=f"^{_AMOUNT}$")]
BytesOrNone = Annotated[_Amount, msgspec.Meta(pattern=f"^({_AMOUNT})?$")]
File = Annotated[str, Shown("FILE")]
Directory = Annotated[str, Shown("DIR")]
Parser = Annotated[str, Shown("NAME")]
Texts = tuple[str, ...] | str
"""A list, or one text with commas: the environment has no lists."""


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages that each host keeps on disk."""

    directory: Annotated[str, Shown("DIR", "--kv-disk")] = ""
    """Keep KV pages on disk, in this directory of a host.

    It must exist, on a local disk, and be this user's; empty: none are kept."""
    size: BytesOrNone = ""
    """How much they take there in all, like 20GiB; reserved at the start."""
    write: BytesOrNone = ""
    """Most that is written there in a second, like 200MiB; empty: as fast as the disk takes it."""
    policy: StorePolicy = "write_through"
    """When a page is stored: once it is full, or (write_through_selective) when a second request uses it."""

    @property
    def size_bytes(self) -> int:
        """0: nothing is kept on disk."""
        return parse_bytes(self.size)

    @property
    def bytes_per_s(self) -> float:
        """0: no limit."""
        return float(parse_bytes(self.write))


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages that an installed store keeps, instead of a disk."""

    name: Annotated[str, Shown("NAME", "--kv-store")] = ""
    """Keep KV pages in the installed store of this name.

    It is the name of an entry point in the group `kvmesh.stores`; empty: none are kept."""
    options: dict[str, Any] = {}
    """What the store wants to know, whatever that means to it: a table."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Seconds after which a call of the store that has not returned is given up."""
    write: BytesOrNone = ""
    """Most that is given to it in a second, like 200MiB; empty: as fast as it takes it."""
    policy: StorePolicy = "write_through"
    """When a page is stored, as on a disk."""
    key_file: File = ""
    """File with the key by which values are signed, the same on every host; empty: they are not."""

    @property
    def bytes_per_s(self) -> float:
        """0: no limit."""
        return float(parse_bytes(self.write))


class KVSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of each worker."""

    pages: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Pages of each KV pool.

    Without pages and memory, the size follows from the model and from what is free."""
    memory: Bytes | None = None
    """Memory of each KV pool, like 512MiB; not together with pages."""
    page_size: Literal[8, 16, 32, 64] = 16
    """Tokens of a page."""
    directory: Directory = "/dev/shm"
    """Where the pools' files are: in memory (a tmpfs)."""
    disk: DiskSettings = DiskSettings()
    store: StoreSettings = StoreSettings()

    @property
    def stores(self) -> StorePolicy | Literal[""]:
        """By which policy pages are kept outside the pools; empty: they are not."""
        if self.disk.directory:
            return self.disk.policy
        return self.store.policy if self.store.name else ""


class SupervisionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the supervisor watches and restarts actors."""

    fork: bool = True
    """Actors come from one warm process, in milliseconds; without, each gets an interpreter of its own."""
    start_timeout_s: SomeSeconds = 120.0
    """Seconds in which an actor has to be ready, without new progress."""
    drain_timeout_s: Seconds = 30.0
    """Seconds in which an actor may finish its work when it is stopped."""
    restart_budget: Positive = 10
    """How often an actor is restarted within the window before it is given up."""
    restart_window_s: SomeSeconds = 60.0
    """Seconds of that window."""
    kill_after_s: Seconds = 1.0
    """Seconds after which an actor that misses heartbeats is killed."""
    max_log_bytes: Positive = 16 << 20
    """Bytes of each actor's log file, which has one predecessor."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mesh: on one host, or this host's part of it where `hosts` says what runs on which."""

    name: Name = "default"
    """Name of this mesh."""
    model: Annotated[str, msgspec.Meta(min_length=1)] = "tiny"
    """The model: tiny, echo, random:ARCH, a directory, or ORG/NAME of the hub (with @REVISION)."""
    served_name: str | list[str] = ""
    """Name that clients use for the model; may be repeated.

    By default the model's own name. Several are a list, or one text with commas; answers carry the first."""
    chat_template: File = ""
    """Chat template (jinja) to use instead of the model's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is computed in: auto (the checkpoint's own), float32 or bfloat16."""
    quantize: Quantization = "none"
    """Round weights when they are loaded: none or int8.

    On the CPU, in workers that compute alone. A step of one row then reads half of bfloat16's bytes; logits and pages
    of KV differ from those of other workers."""
    pooling: PoolingChoice = "auto"
    """How vectors are made: last, mean or cls, with `,normalize`, or yes_no; default: by the model.

    From the states of the last position, the first (cls) or all (mean), of length one with normalize; yes_no: scores
    by these tokens' logits."""
    device: Device = "cpu"
    """Where models run: cpu, cuda (all devices), or cuda:N,cuda:M,...

    Workers compute and KV pools lie there. Devices are dealt out in order."""
    mem_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=0.98)] = 0.9
    """Share of a device's memory for weights, activations and KV."""
    deterministic: bool = False
    """On a device: fixed tiles, no split sequences; slower.

    Bits depend less on the batch then, though no GPU has shown it yet; on the CPU they never do."""
    memory_saver: bool = False
    """On a device: `release` backs weights up in host memory, while the mesh lives."""
    host: str = "127.0.0.1"
    """Address of the HTTP server; if the file has hosts, the option says which of them this is."""
    port: Port = 8000
    """Port of the HTTP server."""
    cors_origins: Annotated[Texts, Shown("ORIGIN", "--cors-origin")] = ()
    """Web origin that browsers may call from, or `*`; may be repeated.

    A list, or one text with commas."""
    trusted_proxies: Annotated[Texts, Shown("ADDRESS")] = ()
    """Proxy (address or network) whose X-Forwarded-For says who a client is; may be repeated.

    A list, or one text with commas."""
    api_key_file: File = ""
    """Hashes of the API keys that clients must send (`meshctl keys api`); empty: none are asked for."""
    control: bool = False
    """Admin keys may flush caches, release memory and abort requests over HTTP."""
    logprobs_of: LogprobsOf = "raw"
    """Logprobs of the model's own distribution, raw, or of the processed one drawn from.

    It is processed by penalties, masks and temperature."""
    responses_store: BytesOrNone = ""
    """Keep responses of /v1/responses, so much on each host, like 1GiB.

    Clients may come back to them; by default none are kept."""
    page: bool = True
    """Serve a page at / that shows the mesh."""
    otel_endpoint: Annotated[str, Shown("URL")] = ""
    """Send traces of calls to this OTLP/HTTP collector (extra otel); empty: none are sent."""
    tool_call_parser: Parser = ""
    """What reads calls of tools: hermes, ..., or none; default: by template."""
    reasoning_parser: Parser = ""
    """What reads reasoning: qwen3, ..., or none; default: by template."""
    prefill: Count | None = None
    """Number of prefill groups.

    Without any count one prefill and one decode group; if only `mixed` is set there are only mixed ones."""
    decode: Count | None = None
    """Number of decode groups."""
    mixed: Count | None = None
    """Number of groups that do both."""
    tp: Ranks = 1
    """Tensor-parallel ranks of each group, which compute together."""
    prefill_tp: Ranks | None = None
    """The same for prefill groups."""
    decode_tp: Ranks | None = None
    """The same for decode groups."""
    gateways: Several = 1
    """Number of gateways; all share one port."""
    tokenizers: Several = 1
    """Number of tokenizers."""
    detokenizers: Several = 1
    """Number of detokenizers."""
    context_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Most tokens of a prompt and its output together."""
    max_running: Positive = 256
    """Most requests in one batch."""
    chunk: Positive | None = None
    """Most tokens in one prefill chunk; by default 256 on the CPU, 2,048 on a device."""
    max_step_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] | None = None
    """Longest step that prompts may cause while streams run, in milliseconds; 0: no limit.

    A step takes only so many prompt tokens that it lasts about this long, which is then the longest gap in a stream.
    By default 200 on the CPU, and 0 on a device, where it is untried."""
    local_prefill_max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most uncached prompt tokens that a decode group prefills itself; by default 64."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    """Threads of each worker that computes on the CPU; by default the cores are divided up."""
    external: bool = False
    """Actors that no supervisor of the mesh knows may have its roles too, and are sent requests."""
    kv: KVSettings = KVSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    roles: dict[str, dict[str, Any]] = {}
    """Fields of a role's own configuration that no other actor depends on: `[roles.gateway] max_inflight = 100`."""
    hosts: dict[HostName, HostSettings] = {}
    """What runs on which host, a table each; every host then has its own counts instead of these."""
    registry_port: PortOfTwo = 7400
    """Where the registry of a mesh of several hosts listens, and at the next port."""
    keys: Directory = ""
    """Key directory, if not ~/.config/kvmesh/MESH: this host's keys, which encrypt links between hosts."""
    insecure: bool = False
    """Allow links between hosts without keys, unencrypted, also beyond the loopback."""
    on: Annotated[str, Shown(by_words=False)] = ""
    """The host that this machine is. It is never in the file, but comes from `--host`."""

    @property
    def own_host(self) -> HostSettings | None:
        """What the file says about this host; None on a mesh of one host."""
        return self.hosts[self.on] if self.hosts else None

    @property
    def own_counts(self) -> "Settings | HostSettings":
        """The settings that say how many gateways, tokenizers and detokenizers this host has."""
        return self.own_host or self

    @property
    def registry_host(self) -> str:
        """The host that the registry runs on; "" on a mesh of one host."""
        return registry_host(self.hosts)

    @property
    def mesh_groups(self) -> tuple[int, int, int]:
        return mesh_groups(self.hosts) if self.hosts else self.groups

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients call the model; empty: its own name. Raises BadConfig."""
        names = _listed(self.served_name) if self.served_name else []
        if any(not name or not name.isprintable() or len(name) > MAX_NAME_CHARS for name in names):
            raise BadConfig(
                f"{self.served_name!r} cannot be used as names of a model",
                why=f"a name has 1 to {MAX_NAME_CHARS} printable characters, and a comma separates names",
                do="correct --served-name",
            )
        return tuple(dict.fromkeys(names))

    @property
    def chunk_tokens(self) -> int:
        return self.chunk or (_CPU_CHUNK if self.device == "cpu" else _DEVICE_CHUNK)

    @property
    def max_step_s(self) -> float:
        """Seconds that a step of prompts and running streams may take at most, default filled in; 0: no limit."""
        if self.max_step_ms is None:
            return _CPU_STEP_S if self.device == "cpu" else 0.0
        return self.max_step_ms / 1e3

    @property
    def responses_store_bytes(self) -> int:
        """0: no responses are kept."""
        return parse_bytes(self.responses_store)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """`cors_origins` as a list, each checked. Raises BadConfig."""
        origins = tuple(filter(None, _listed(self.cors_origins)))
        for origin in origins:
            scheme, separator, host = origin.partition("://")
            if origin != "*" and not (scheme and separator and host and "/" not in host):
                raise BadConfig(
                    f"the origin {origin!r} cannot be allowed",
                    why="browsers name an origin by scheme, host and port alone, and it is compared as a whole",
                    do="write it like https://chat.example or http://localhost:3000, or `*` for all",
                )
        return origins

    @property
    def proxies(self) -> tuple[str, ...]:
        """`trusted_proxies` as a list, each checked. Raises BadConfig."""
        proxies = tuple(filter(None, _listed(self.trusted_proxies)))
        do = "write addresses or networks, like 10.0.0.7, 10.0.0.0/8 or ::1"
        with _refusing("the trusted proxies cannot be used", do):
            read_networks(proxies)
        return proxies

    @property
    def collector(self) -> str:
        """`otel_endpoint`, checked. Raises BadConfig."""
        if self.otel_endpoint:
            # Only then: most hosts do not have what is looked for.
            from nodes.gateway.records.otel.export import check_endpoint

            do = "correct --otel-endpoint, install the extra, or leave the option out"
            with _refusing("traces cannot be exported", do):
                check_endpoint(self.otel_endpoint)
        return self.otel_endpoint

    def check_parsers(self) -> None:
        """Raises BadConfig for the name of a parser that is not installed here."""
        do = "correct --tool-call-parser or --reasoning-parser, or leave it out: the chat template decides then"
        with _refusing("answers cannot be read as these settings say", do):
            check_names(self.tool_call_parser, self.reasoning_parser)

    @property
    def groups(self) -> tuple[int, int, int]:
        """How many prefill, decode and mixed groups this host has, defaults filled in."""
        if self.own_host is not None:
            return self.own_host.groups
        if self.prefill is None and self.decode is None:
            return (0, 0, self.mixed) if self.mixed else (1, 1, 0)
        given = 1 if self.mixed is None else 0
        prefill = given if self.prefill is None else self.prefill
        decode = given if self.decode is None else self.decode
        return prefill, decode, self.mixed or 0

    def tp_size(self, phase: str) -> int:
        own = {"prefill": self.prefill_tp, "decode": self.decode_tp}.get(phase)
        return self.tp if own is None else own


def parse_bytes(text: str) -> int:
    """The bytes that an amount stands for: `512MiB`, `2G`, `1048576`; nothing is 0. The text has been checked."""
    match = re.fullmatch(_AMOUNT, text)
    if match is None:
        return 0
    number, unit = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit.lower() or " "))


def _listed(given: Iterable[str] | str) -> list[str]:
    """What a list says, or one text, with commas between words in any of its texts."""
    texts = [given] if isinstance(given, str) else given
    return [word.strip() for text in texts for word in text.split(",")]


@contextmanager
def _refusing(what: str, do: str) -> Generator[None]:
    """Raise BadConfig for what a role's own check of a setting finds."""
    try:
        yield
    except (ValueError, ParserUnusable, TypedError) as error:
        raise BadConfig(what, why=str(error), do=do) from None
