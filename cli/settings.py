"""What a user may set: one TOML topology file, overlaid by KVMESH_* variables, overlaid by options.

Pure but for reading the file; `cli/topology.py` makes the list of actors from it. Precedence, last one wins: defaults,
file, environment, options.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec

from cli.errors import BadConfig

ENVIRONMENT_PREFIX: Final = "KVMESH_"

_CPU_CHUNK: Final = 256
_DEVICE_CHUNK: Final = 2048
"""A device needs some thousand rows for its products to be as fast as it can multiply."""

Count = Annotated[int, msgspec.Meta(ge=0, le=256)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=64)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9][a-z0-9-]{0,23}$",
        description="Lower-case letters, digits and dashes, at most 24: it names sockets, whose paths are short.",
    ),
]

Device = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(cpu|cuda|cuda:\d{1,3}(,cuda:\d{1,3})*)$",
        description="cpu, cuda (all that are visible), or the ones to use: cuda:N, or cuda:N,cuda:M,...",
    ),
]


class KVSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool of each worker: `pages`, or as many as fit `memory`; neither: a default from the model."""

    pages: Annotated[int, msgspec.Meta(ge=2)] | None = None
    memory: str | None = None
    page_size: Literal[8, 16, 32, 64] = 16
    directory: str = "/dev/shm"


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
    """One mesh on one host.

    `device` is where workers compute and KV pools lie: the CPU, or CUDA devices, which are dealt out in order; on each
    of them weights, activations and pools take at most `mem_fraction` of its memory. `deterministic` takes fixed tiles
    and splits no sequence there, so that bits depend less on the batch, which no GPU has shown yet (on the CPU they
    never do). With `memory_saver` weights can be released into the host's memory while the mesh lives. With
    `pool_in_worker` workers make the pages of their pools themselves: one CUDA context less where no pages are copied,
    and a worker's death costs its KV. `chunk`, if left alone, is 256 on the CPU and 2,048 on a device.

    `prefill` and `decode` count worker groups of each kind, `mixed` groups that do both; with `mixed` set and the other
    two left alone there are only mixed ones. `tp` tensor-parallel ranks compute together in each group, `prefill_tp`
    and `decode_tp` in groups of that kind. `served_name` is what clients call the model, by default the model's own
    name. `roles` overrides fields of a role's own configuration: `[roles.gateway] max_inflight = 100`.
    """

    name: Name = "default"
    model: Annotated[str, msgspec.Meta(min_length=1)] = "tiny"
    served_name: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Device = "cpu"
    mem_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=0.98)] = 0.9
    deterministic: bool = False
    memory_saver: bool = False
    pool_in_worker: bool = False
    host: str = "127.0.0.1"
    port: Port = 8000
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
    local_prefill_max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    kv: KVSettings = KVSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    roles: dict[str, dict[str, Any]] = {}

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one prefill chunk, default filled in."""
        return self.chunk or (_CPU_CHUNK if self.device == "cpu" else _DEVICE_CHUNK)

    @property
    def groups(self) -> tuple[int, int, int]:
        """How many prefill, decode and mixed groups there are, defaults filled in."""
        if self.prefill is None and self.decode is None:
            return (0, 0, self.mixed) if self.mixed else (1, 1, 0)
        given = 1 if self.mixed is None else 0
        prefill = given if self.prefill is None else self.prefill
        decode = given if self.decode is None else self.decode
        return prefill, decode, self.mixed or 0

    def tp_size(self, phase: str) -> int:
        """Tensor-parallel ranks of groups of a phase, defaults filled in."""
        own = {"prefill": self.prefill_tp, "decode": self.decode_tp}.get(phase)
        return self.tp if own is None else own


def load_settings(file: Path | None, environment: Mapping[str, str], options: Mapping[str, Any]) -> Settings:
    """Overlay all sources and check them. Options that are None are not given. Raises BadConfig."""
    document: dict[str, Any] = _read_file(file) if file is not None else {}
    source = str(file) if file is not None else "the defaults"
    settings = _convert(document, source, strict=True)
    for name, value in sorted(environment.items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX) or name in _OTHER_VARIABLES:
            continue
        _set(document, key.split("__"), value)
        settings = _convert(document, f"the environment variable {name}", strict=False)
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        _set(document, key.split("__"), value)
        settings = _convert(document, f"the option for {key.replace('__', ' ').replace('_', ' ')}", strict=False)
    return settings


def parse_bytes(text: str) -> int:
    """`512MiB`, `2G`, `1048576`: a number of bytes. Raises BadConfig."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    if match is None:
        raise BadConfig(f"{text!r} is no amount of memory", do="write it like 512MiB, 2GiB or 1048576")
    number, unit, _ = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit or " "))


_OTHER_VARIABLES: Final = frozenset({"KVMESH_TOPOLOGY", "KVMESH_LOG_LEVEL", "KVMESH_LOG_FORMAT"})


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
    try:
        return msgspec.convert(document, Settings, strict=strict)
    except msgspec.ValidationError as error:
        raise BadConfig(
            f"{source} cannot be used",
            why=str(error),
            do="`meshctl config schema` shows what is allowed, `meshctl config show` what is set",
        ) from error


def _set(document: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = document.setdefault(key, {})
        if not isinstance(inner, dict):
            raise BadConfig(f"{'.'.join(path)} cannot be set", why=f"{key} is not a table")
        document = cast("dict[str, Any]", inner)
    document[path[-1]] = value
