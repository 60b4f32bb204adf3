"""What a user may set: one TOML topology file, overlaid by KVMESH_* variables, overlaid by options.

Pure but for reading the file; `cli/plan/topology.py` makes the list of actors from it. Precedence, last one wins:
defaults, file, environment, options.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec

from cli.errors import BadConfig
from cli.plan.faults import Fault, find_fault, unknown_name
from cli.plan.hosts import (
    Count,
    Device,
    HostName,
    HostSettings,
    check_hosts,
    hosts_fault,
    mesh_groups,
    registry_host,
)
from cli.plan.role_configs import CONFIG_TYPES, typed_roles
from mesh.errors import BadSetting
from mesh.runtime.telemetry import LogSettings
from nodes.asks import LogprobsOf
from nodes.gateway.clients import read_networks
from nodes.gateway.parsers import ParserUnusable, check_names
from nodes.model_spec import PoolingChoice, Quantization
from nodes.scheduler.config import StorePolicy

ENVIRONMENT_PREFIX: Final = "KVMESH_"

MAX_NAME_CHARS: Final = 200
"""A name is in every answer, and in each chunk of a stream; the longest of the hub have 96 characters."""

_CPU_CHUNK: Final = 256
_CPU_STEP_S: Final = 0.2
"""Room for one to four pages beside 16 rows of a model of 0.5 billion parameters on two cores (135 or 51 ms for the
rows, 2.6 or 1.9 ms a prompt token, by torch's kernels or native ones); steps of smaller models are full before."""
_DEVICE_CHUNK: Final = 2048
"""A device needs some thousand rows in a product to multiply at full speed."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=64)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOfTwo = Annotated[int, msgspec.Meta(ge=1, le=65534)]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9][a-z0-9-]{0,23}$",
        description="lower-case letters, digits and dashes, at most 24 (part of socket paths, which must be short)",
    ),
]


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages that each host keeps on disk: in `directory`, which must exist, `size` in all; "": none are kept.

    `write` is how much may be written in a second, like `200MiB`; "": as fast as the disk takes it. By `policy` a page
    is stored when it is full (`write_through`), or when a second request uses it (`write_through_selective`).
    """

    directory: str = ""
    size: str = ""
    write: str = ""
    policy: StorePolicy = "write_through"

    @property
    def size_bytes(self) -> int:
        """0: nothing is kept on disk. Raises BadConfig."""
        return parse_bytes(self.size, "--kv-disk-size ([kv.disk] size)") if self.size else 0

    @property
    def bytes_per_s(self) -> float:
        """0: no limit. Raises BadConfig."""
        return float(parse_bytes(self.write, "--kv-disk-write ([kv.disk] write)")) if self.write else 0.0


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages that an installed store keeps, the entry point `name` of `kvmesh.stores`; "": none are kept.

    It gets `options`, whatever they mean to it. A call of it is given up after `deadline_s` seconds. `write` and
    `policy` as on a disk. `key_file` has the key by which values are signed, the same one on every host; "": they are
    not.
    """

    name: str = ""
    options: dict[str, Any] = {}
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    write: str = ""
    policy: StorePolicy = "write_through"
    key_file: str = ""

    @property
    def bytes_per_s(self) -> float:
        """0: no limit. Raises BadConfig."""
        return float(parse_bytes(self.write, "[kv.store] write")) if self.write else 0.0


class KVSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of each worker: `pages`, or as many as fit `memory`; neither: a default from the model."""

    pages: Annotated[int, msgspec.Meta(ge=2)] | None = None
    memory: str | None = None
    page_size: Literal[8, 16, 32, 64] = 16
    directory: str = "/dev/shm"
    disk: DiskSettings = DiskSettings()
    store: StoreSettings = StoreSettings()

    @property
    def stores(self) -> StorePolicy | Literal[""]:
        """By which policy pages are kept outside the pools; empty: they are not."""
        if self.disk.directory:
            return self.disk.policy
        return self.store.policy if self.store.name else ""


class SupervisionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the supervisor watches and restarts actors. All `_s` are seconds.

    `fork`: actors come from one warm process, in milliseconds; false gives each an interpreter of its own.
    """

    fork: bool = True
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    restart_budget: Positive = 10
    restart_window_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    kill_after_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    max_log_bytes: Positive = 16 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mesh: on one host, or this host's part of it where `hosts` says what runs on which.

    `device` is where workers compute and KV pools lie: the CPU, or CUDA devices, which are dealt out in order; on each
    device weights, activations and pools take at most `mem_fraction` of its memory. `deterministic` uses fixed tiles
    and splits no sequence there, so that bits depend less on the batch, though no GPU has shown it yet (on the CPU
    they never do). With `memory_saver` weights can be released into the host's memory while the mesh lives. `chunk` is
    256 on the CPU and 2,048 on a device by default. `max_step_ms`: while streams run, a step takes only so many prompt
    tokens that it lasts about this long, which is then the longest gap in a stream. The default is 200 on the CPU, and
    0, no limit, on a device, where it is untried.

    `quantize` rounds weights when they are loaded: to `int8` on the CPU, in workers that compute alone. A step of one
    row then reads half of bfloat16's bytes; logits and pages of KV differ from those of other workers.

    `pooling` is how vectors are made, if not as the model's folder says: from the states of the last position (`last`),
    the first (`cls`) or all (`mean`), with `,normalize` of length one; or `yes_no`, scores by these tokens' logits.

    `prefill` and `decode` count worker groups of each kind, `mixed` groups that do both; if only `mixed` is set there
    are only mixed ones. `tp` tensor-parallel ranks compute together in each group, `prefill_tp` and `decode_tp` in
    groups of that kind. `served_name` is what clients call the model, by default the model's own name; several names
    are a list, or one text with commas between them, and answers carry the first. `chat_template` is a file to use
    instead of the model's own template. `cors_origins`, a list or a text with commas, are the web origins from which
    browsers may send requests, or `*`. `trusted_proxies`, written alike, are addresses and networks of proxies: of
    what comes from there, `X-Forwarded-For` says which client it is. `api_key_file` is this host's file of the API
    keys that clients must send (`cli/plan/api_keys.py`); "": none. With `control`, admin keys may change the mesh
    by way of gateways: abort everybody's requests, flush caches, release memory. `logprobs_of` is the distribution
    of which logprobs are answered: the model's own, `raw`, or the one drawn from, `processed` by penalties, masks
    and temperature. Without `page` gateways have no page at `/`. `otel_endpoint` is the URL of a
    collector to which gateways send the spans of calls (extra `otel`); "": none are sent.
    `tool_call_parser` and `reasoning_parser` name what reads calls of tools and
    reasoning in answers; empty: what fits the chat template; `none`: nothing. `responses_store` is how much is kept
    on each host of responses that clients may come back to, like `1GiB`; by default nothing is. `roles` overrides
    fields of a role's own configuration: `[roles.gateway] max_inflight = 100`. With `external`, actors that no
    supervisor of the mesh knows may have its roles too, and are sent requests.

    With `hosts`, each host has its own counts instead of these, and `on` is the host that this machine is: it is never
    in the file but comes from `--host`, which without `hosts` sets `host`, where gateways listen for HTTP. The registry
    listens at `registry_port` of its host and at the next port. `keys` is the directory of this host's keys, which
    encrypt links between hosts (`cli/plan/keys.py`); `insecure` does without, also beyond the loopback.
    """

    name: Name = "default"
    model: Annotated[str, msgspec.Meta(min_length=1)] = "tiny"
    served_name: str | list[str] = ""
    chat_template: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantize: Quantization = "none"
    pooling: PoolingChoice = "auto"
    device: Device = "cpu"
    mem_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=0.98)] = 0.9
    deterministic: bool = False
    memory_saver: bool = False
    host: str = "127.0.0.1"
    port: Port = 8000
    cors_origins: tuple[str, ...] | str = ()
    trusted_proxies: tuple[str, ...] | str = ()
    api_key_file: str = ""
    control: bool = False
    logprobs_of: LogprobsOf = "raw"
    responses_store: str = ""
    page: bool = True
    otel_endpoint: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    prefill: Count | None = None
    decode: Count | None = None
    mixed: Count | None = None
    tp: Ranks = 1
    prefill_tp: Ranks | None = None
    decode_tp: Ranks | None = None
    gateways: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    tokenizers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    detokenizers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    context_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_running: Positive = 256
    chunk: Positive | None = None
    max_step_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] | None = None
    local_prefill_max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    external: bool = False
    kv: KVSettings = KVSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    roles: dict[str, dict[str, Any]] = {}
    hosts: dict[HostName, HostSettings] = {}
    registry_port: PortOfTwo = 7400
    keys: str = ""
    insecure: bool = False
    on: str = ""

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
        given = self.served_name if isinstance(self.served_name, list) else [self.served_name]
        names = [name.strip() for text in given for name in text.split(",")] if self.served_name else []
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
        """0: no responses are kept. Raises BadConfig."""
        return parse_bytes(self.responses_store, "--responses-store (responses_store)") if self.responses_store else 0

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """`cors_origins` as a list, each checked. Raises BadConfig."""
        given = self.cors_origins.split(",") if isinstance(self.cors_origins, str) else self.cors_origins
        origins = tuple(filter(None, (origin.strip() for origin in given)))
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
        given = self.trusted_proxies.split(",") if isinstance(self.trusted_proxies, str) else self.trusted_proxies
        proxies = tuple(filter(None, (one.strip() for one in given)))
        try:
            read_networks(proxies)
        except ValueError as error:
            raise BadConfig(
                "the trusted proxies cannot be used",
                why=str(error),
                do="write addresses or networks, like 10.0.0.7, 10.0.0.0/8 or ::1",
            ) from None
        return proxies

    @property
    def collector(self) -> str:
        """`otel_endpoint`, checked. Raises BadConfig."""
        if self.otel_endpoint:
            # Only then: most hosts do not have what is looked for.
            from nodes.gateway.records.otel.export import ExportUnusable, check_endpoint

            try:
                check_endpoint(self.otel_endpoint)
            except ExportUnusable as error:
                raise BadConfig(
                    "traces cannot be exported",
                    why=error.message,
                    do="correct --otel-endpoint, install the extra, or leave the option out",
                ) from None
        return self.otel_endpoint

    @property
    def parsers(self) -> tuple[str, str]:
        """`tool_call_parser` and `reasoning_parser`, checked. Raises BadConfig."""
        try:
            check_names(self.tool_call_parser, self.reasoning_parser)
        except ParserUnusable as error:
            raise BadConfig(
                "answers cannot be read as these settings say",
                why=str(error),
                do="correct --tool-call-parser or --reasoning-parser, or leave it out: the chat template decides then",
            ) from None
        return self.tool_call_parser, self.reasoning_parser

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


def load_settings(
    file: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
) -> Settings:
    """Overlay all sources and check them. Options that are None count as not given. Raises BadConfig.

    `told` is what the mesh's registry says, instead of a file.
    """
    settings, own, given = overlay_settings(file, environment, options, told)
    if not settings.hosts:
        return settings
    check_hosts(settings.hosts, own, given)
    return _on_host(settings, own)


def overlay_settings(
    file: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
) -> tuple[Settings, str, Collection[str]]:
    """The same for any host: the settings, the name given for this host, and what was set. Raises BadConfig."""
    _check_log_variables(environment)
    document: dict[str, Any] = _read_file(file) if file is not None else dict(told or {})
    source = str(file) if file is not None else "the defaults" if told is None else "what the registry sent"
    settings = _convert(document, source, strict=True)
    given = {key: value for key, value in options.items() if value is not None}
    own = ""
    if settings.hosts:
        # With hosts, `--host` says which of them this is, and only the file says where gateways listen.
        own = str(given.pop("host", None) or environment.get(_HOST_VARIABLE, ""))
    for name, path in _variables(environment).items():
        if not _is_setting(path) or (settings.hosts and name == _HOST_VARIABLE):
            continue
        _set(document, path, environment[name])
        source = f"the environment variable {name}"
        if environment[name].startswith("tcp://"):
            # A pod beside a service named kvmesh has KVMESH_PORT=tcp://10.0.0.1:8000 and others like it.
            source += " (Kubernetes sets it for a service of that name unless enableServiceLinks: false)"
        settings = _convert(document, source, strict=False)
    for key, value in given.items():
        _set(document, key.split("__"), value)
        settings = _convert(document, f"--{key.replace('_', '-').replace('--', '-')}", strict=False)
    if settings.kv.memory is not None:
        parse_bytes(settings.kv.memory)
    _ = settings.responses_store_bytes
    _check_disk(settings.kv.disk)
    _check_store(settings.kv)
    if settings.kv.memory is not None and settings.kv.pages is not None:
        raise BadConfig(
            "the size of KV pools is given twice",
            why=f"--kv-pages ([kv] pages) is {settings.kv.pages}, --kv-memory ([kv] memory) is {settings.kv.memory}",
            do="remove one of them",
        )
    return settings, own, document.keys()


def _check_disk(disk: DiskSettings) -> None:
    size_bytes, _ = disk.size_bytes, disk.bytes_per_s
    if bool(disk.directory) == bool(size_bytes):
        return
    if disk.directory:
        what, why = "--kv-disk has no size", "all of it is reserved at the start, so that the disk is not full later"
        raise BadConfig(what, why=why, do="say how much the pages may take there, like --kv-disk-size 20GiB")
    raise BadConfig(
        "--kv-disk-size says how large, but not where",
        why="no directory is named ([kv.disk] directory)",
        do="name one on a local disk with --kv-disk, or leave the size out",
    )


def _check_store(kv: KVSettings) -> None:
    store, _ = kv.store, kv.store.bytes_per_s
    if store.name and kv.disk.directory:
        raise BadConfig(
            "--kv-disk and --kv-store are both given",
            why=f"pages are kept in one place, in {kv.disk.directory} or by the store {store.name}",
            do="leave one of them out ([kv.disk] directory, [kv.store] name)",
        )
    if (store.options or store.key_file) and not store.name:
        raise BadConfig(
            f"[kv.store] has {'options' if store.options else 'a key_file'}, but no name",
            why="no store is named that they could be for",
            do="name an installed one with --kv-store, or leave them out",
        )


def _on_host(settings: Settings, own: str) -> Settings:
    """The settings as one host has them. Every host's device is filled in, and `device` becomes this host's."""
    devices = {name: host.device or settings.device for name, host in settings.hosts.items()}
    hosts = {name: msgspec.structs.replace(host, device=devices[name]) for name, host in settings.hosts.items()}
    return msgspec.structs.replace(settings, on=own, hosts=hosts, device=hosts[own].device)


def foreign_variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings about variables that look like ours but set nothing: they are somebody else's, or misspelled."""
    found: list[str] = []
    known = [ENVIRONMENT_PREFIX + "__".join(path).upper() for path in _paths(Settings)] + sorted(_OTHER_VARIABLES)
    for name, path in _variables(environment).items():
        if not _is_setting(path):
            near = difflib.get_close_matches(name, known, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            found.append(f"the environment variable {name} is not read: there is no such setting{guess}")
    return found


def parse_bytes(text: str, name: str = "--kv-memory ([kv] memory)") -> int:
    """What a setting of this name means, `512MiB`, `2G`, `1048576`: a number of bytes. Raises BadConfig."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    if match is None:
        raise BadConfig(
            f"{name} is {text!r}, which is not an amount of memory",
            why="it is not a number followed by KiB, MiB, GiB or TiB, or by nothing for bytes",
            do="write it like 512MiB, 2GiB or 1048576",
        )
    number, unit, _ = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit or " "))


API_KEYS_VARIABLE: Final = "KVMESH_API_KEYS"
API_KEY_VARIABLE: Final = "KVMESH_API_KEY"
_OTHER_VARIABLES: Final = frozenset(
    {
        "KVMESH_TOPOLOGY", "KVMESH_LOG_LEVEL", "KVMESH_LOG_FORMAT", "KVMESH_NCCL_LIBRARY", API_KEYS_VARIABLE,
        API_KEY_VARIABLE,
    }
)  # fmt: skip
"""Documented variables that are not settings of a mesh."""
_HOST_VARIABLE: Final = "KVMESH_HOST"
_NOT_BY_WORDS: Final = ("roles", "hosts", "on", "options")
"""Settings that no single string can set."""


def _variables(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables that may be settings, in order of their names, and the path of each."""
    names = [name for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIX)]
    return {
        name: name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        for name in names
        if name not in _OTHER_VARIABLES
    }


def _is_setting(path: list[str]) -> bool:
    match path:
        case ["roles", role, field]:
            return role in CONFIG_TYPES and field in CONFIG_TYPES[role].__struct_fields__
        case ["kv", "store", "options", _]:
            # The store alone knows which there are.
            return True
        case _:
            # A table by itself is not one: the environment has strings only.
            return path in _paths(Settings)


def _paths(struct: type[msgspec.Struct]) -> list[list[str]]:
    paths: list[list[str]] = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            paths += [[field.name, *path] for path in _paths(field.type)]
        elif field.name not in _NOT_BY_WORDS:
            paths.append([field.name])
    return paths


def _check_log_variables(environment: Mapping[str, str]) -> None:
    try:
        LogSettings.from_environment(environment)
    except BadSetting as error:
        raise BadConfig(
            f"the environment variable {error.param} cannot be used", why=error.message, do="correct it, or unset it"
        ) from error


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise BadConfig(
            f"the topology file {file} cannot be read", why=str(error), do="give a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"the topology file {file} is not TOML", why=str(error), do="correct it") from error


def _convert(document: dict[str, Any], source: str, *, strict: bool) -> Settings:
    fault = hosts_fault(document.get("hosts", {}))
    if "on" in document:
        fault = Fault("`on` cannot be set in the file: --host says which host this is", "give --host NAME")
    fault = fault or find_fault(document, Settings, strict=strict)
    for role, fields in () if fault else document.get("roles", {}).items():
        fault = fault or role_fault(role, fields)
    if fault is not None:
        raise BadConfig(
            f"{source} cannot be used", why=fault.why, do=f"{fault.do} (`meshctl config schema` shows what is allowed)"
        )
    settings = msgspec.convert(document, Settings, strict=strict)
    return msgspec.structs.replace(settings, roles=typed_roles(settings.roles))


def role_fault(role: str, fields: Mapping[str, Any]) -> Fault | None:
    if role not in CONFIG_TYPES:
        return unknown_name(role, CONFIG_TYPES, "role")
    # The environment has strings only.
    return find_fault(fields, CONFIG_TYPES[role], f"roles.{role}", strict=False)


def _set(document: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        # Everything on the way is a table: other paths are not settings, and the file has been checked.
        document = cast("dict[str, Any]", document.setdefault(key, {}))
    document[path[-1]] = value
