"""Which actors make up a mesh, and how each is configured: settings and a model in, a list of launches out. Pure.

Called by `meshctl up` (which starts the list, or prints it with `--dry-run`) and by `meshctl config`.
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from cli.errors import BadConfig
from cli.plan.devices import DeviceMemory, check_device_options
from cli.plan.faults import Fault, find_fault, unknown_name
from cli.plan.groups import WorkerGroup, plan_groups
from cli.plan.pools import PoolPlan
from cli.plan.role_configs import CONFIG_TYPES, PLANNED
from cli.plan.settings import Settings
from cli.supervisor.mesh_directory import segment_prefix
from kvstore.pool.device import CPU
from nodes import roles
from nodes.context_length import ServedContext
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.kv_agent.config import KVAgentConfig
from nodes.model_spec import ModelSpec
from nodes.registry.config import RegistryConfig
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig

ACTOR_MODULES: Final = {
    roles.GATEWAY: "nodes.gateway.actor",
    roles.TOKENIZER: "nodes.tokenizer.actor",
    roles.SCHEDULER: "nodes.scheduler.actor",
    roles.WORKER: "nodes.worker.actor",
    roles.DETOKENIZER: "nodes.detokenizer.actor",
    roles.KV_AGENT: "nodes.kv_agent.actor",
    roles.REGISTRY: "nodes.registry.actor",
}
"""What the warm process imports for each role."""

_TORCH_MODULE: Final = "nodes.worker.executor.runner"

# Whoever holds clients goes first, whoever others need to finish goes later.
_DRAIN_TIERS: Final = {
    roles.GATEWAY: 0,
    roles.TOKENIZER: 1,
    roles.SCHEDULER: 1,
    roles.DETOKENIZER: 1,
    roles.WORKER: 2,
    # Memory on a device must not be freed while another process still has it mapped.
    roles.KV_AGENT: 3,
    roles.REGISTRY: 4,
}

_OWN_FILES: Final = 64
_PEER_FILES: Final = 8
"""Descriptors of a link: two sockets each way, with what ZeroMQ wakes itself by."""

_KV_AGENT_ID: Final = "kv-agent-0"
_COMPILE_S: Final = 1200.0
"""The first start on a host compiles FlashInfer's kernels, minutes each on a few cores."""

Start = Literal["plain", "fork"]


class ActorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One actor to start. `start`: `plain` is a new interpreter, `fork` is forked from the warm zygote.

    `config` is what it is configured with alone, `supervised` what it is told besides under a supervisor.
    `start_timeout_s`: seconds until it has to be ready. Actors of one `kind` stand in for each other.
    """

    actor_id: str
    role: str
    kind: str
    config: dict[str, Any]
    supervised: dict[str, Any] = {}
    start: Start = "plain"
    drain_tier: int = 1
    start_timeout_s: float = 120.0

    @property
    def supervised_config(self) -> dict[str, Any]:
        """Its configuration under a supervisor."""
        return self.config | self.supervised


class Machine(NamedTuple):
    """What the plan depends on besides settings and model. `devices`: those that the settings name, if any;
    `max_files`: descriptors that a process may have, None for any number.
    """

    num_cores: int
    pool_free_bytes: int
    uid: int
    devices: tuple[DeviceMemory, ...] = ()
    max_files: int | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A whole mesh. `pool_bytes` is what all KV pools take in `pool_directory`, in files beginning with `prefix`, where
    pools on a device have only their page tables.

    `preloads` are the modules that the zygote imports, `notes` what people should know before it starts.
    """

    settings: Settings
    model_name: str
    actors: list[ActorLaunch]
    num_threads: int
    pool_directory: str
    pool_prefix: str
    pool_bytes: int
    context: ServedContext
    preloads: list[str]
    notes: list[str] = []

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = self.settings.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{self.settings.port}" if ":" in host else f"http://{host}:{self.settings.port}"

    @property
    def forks(self) -> bool:
        """Whether any actor needs the zygote."""
        return any(launch.start == "fork" for launch in self.actors)


def plan_topology(settings: Settings, spec: ModelSpec, model: str, machine: Machine, origin: str = "") -> Topology:
    """The mesh that `settings` ask for; `model` is how actors find `spec`. Raises BadConfig or NoMemory.

    `origin` is what clients are told of where the model comes from, in the place of `model`: a repository, its commit.
    """
    return _Planner(settings, spec, model, machine, origin).plan()


class _Planner:
    def __init__(self, settings: Settings, spec: ModelSpec, model: str, machine: Machine, origin: str) -> None:
        self._settings = settings
        self._spec = spec
        self._model = model
        self._origin = origin
        self._served_names = settings.served_names or (spec.name,)
        self._machine = machine
        if settings.context_length is not None and settings.context_length > spec.context_length:
            raise BadConfig(
                f"a context of {settings.context_length} tokens cannot be served",
                why=f"{spec.name} was made for {spec.context_length}",
                do="give --context-length at most that",
            )
        if settings.quantize != "none" and spec.source == "echo":
            raise BadConfig(
                "echo cannot be quantised", why="it has no weights", do="leave --quantize out, or give a model"
            )
        if settings.device != CPU and spec.source == "echo":
            raise BadConfig(
                f"echo cannot run on {settings.device}",
                why="it computes nothing",
                do="leave --device out, or give a model",
            )
        self._groups = plan_groups(settings, spec, [memory.name for memory in machine.devices])
        # Cores are shared out: two workers of two threads each on 2 cores took 108 ms for a layer's step of 4 ms.
        self._num_threads = settings.threads or max(
            1, machine.num_cores // sum(group.tp_size for group in self._groups)
        )
        check_device_options(settings, max(group.tp_size for group in self._groups))
        self._prefix = segment_prefix(machine.uid, settings.name)

    def plan(self) -> Topology:
        settings = self._settings
        plan = PoolPlan(settings, self._spec, self._groups, self._machine.pool_free_bytes, self._machine.devices)
        pools = plan.pools(self._max_batch_tokens)
        pool_bytes = plan.require_room(pools)
        context = plan.context(pools)
        agent = KVAgentConfig(pools=pools, directory=settings.kv.directory, prefix=self._prefix)
        actors = [
            self._launch("registry", RegistryConfig()),
            *(self._launch(f"gateway-{number}", self._gateway(context)) for number in range(settings.gateways)),
            # The supervisor removes the segments in the end: until then the next agent finds them.
            self._launch(_KV_AGENT_ID, agent, unlink_on_stop=False),
        ]
        for number in range(settings.tokenizers):
            config = TokenizerConfig(
                model=self._model, context_length=context.length, chat_template=settings.chat_template
            )
            actors.append(self._launch(f"tokenizer-{number}", config))
        for number in range(settings.detokenizers):
            config = DetokenizerConfig(model=self._model)
            actors.append(self._launch(f"detokenizer-{number}", config))
        for group in self._groups:
            for rank, worker_id in enumerate(group.worker_ids):
                actors.append(self._launch(worker_id, self._worker(group, rank)))
            actors.append(self._launch(f"scheduler-{group.name}", self._scheduler(group, context.length)))
        return Topology(
            settings=settings,
            model_name=self._served_names[0],
            actors=actors,
            num_threads=self._num_threads,
            pool_directory=settings.kv.directory,
            pool_prefix=self._prefix,
            pool_bytes=pool_bytes,
            context=context,
            preloads=self._preloads(actors),
            notes=self._notes(actors),
        )

    def _notes(self, actors: list[ActorLaunch]) -> list[str]:
        notes: list[str] = []
        prefill, decode, mixed = self._settings.groups
        if not mixed and not decode:
            notes.append("there is no decode group: prefill groups decode, too")
        if not mixed and not prefill:
            notes.append("there is no prefill group: decode groups prefill, too")
        gateway = next(launch for launch in actors if launch.role == roles.GATEWAY)
        wanted = msgspec.convert(gateway.config, GatewayConfig).max_connections
        limit = self._machine.max_files
        own = _OWN_FILES + _PEER_FILES * len(actors)
        if limit is not None and wanted + own > limit:
            notes.append(
                f"`ulimit -Hn` is {limit:,}: a gateway can hold about {max(0, limit - own):,} connections, not the "
                f"{wanted:,} of max_connections; raise it to {wanted + own:,}, or set [roles.gateway] max_connections"
            )
        return notes

    def _preloads(self, actors: list[ActorLaunch]) -> list[str]:
        forked = {launch.role for launch in actors if launch.start == "fork"}
        modules = [ACTOR_MODULES[role] for role in forked]
        if roles.WORKER in forked and self._spec.source != "echo":
            modules.append(_TORCH_MODULE)
        return sorted(modules)

    def _gateway(self, context: ServedContext) -> GatewayConfig:
        settings = self._settings
        return GatewayConfig(
            model_name=self._served_names[0],
            aliases=self._served_names[1:],
            sampling_defaults=self._spec.sampling_defaults,
            context_length=context.length,
            context=context,
            model=self._origin or self._model,
            quantization=settings.quantize,
            vocab_size=self._spec.vocab_size,
            host=settings.host,
            port=settings.port,
            cors_origins=settings.allowed_origins,
            # Several share the port; alone it must not share it with a stranger.
            reuse_port=settings.gateways > 1,
        )

    def _scheduler(self, group: WorkerGroup, context_length: int) -> SchedulerConfig:
        settings = self._settings
        chunk, page_size = settings.chunk_tokens, settings.kv.page_size
        if chunk % page_size:
            raise BadConfig(
                f"a prefill chunk of {chunk} tokens cannot be used",
                why=f"it is not a multiple of the page of {page_size} tokens",
                do=f"give --chunk {max(1, chunk // page_size) * page_size}, say",
            )
        config = SchedulerConfig(
            group=group.name,
            worker=group.worker_ids[0],
            workers=group.worker_ids if group.tp_size > 1 else (),
            agent=_KV_AGENT_ID,
            context_length=context_length,
            phase=group.phase,
            eos_token_ids=self._spec.eos_token_ids,
            page_size=page_size,
            step_tokens=self._step_tokens,
            chunk_tokens=chunk,
            max_step_s=settings.max_step_s,
            max_running=settings.max_running,
        )
        if settings.local_prefill_max is None:
            return config
        return msgspec.structs.replace(config, local_prefill_max=settings.local_prefill_max)

    @property
    def _step_tokens(self) -> int:
        # Room for a whole chunk beside a full batch that decodes: neither then waits for the other.
        return max(self._settings.chunk_tokens + self._settings.max_running, 512)

    def _worker(self, group: WorkerGroup, rank: int) -> WorkerConfig:
        return WorkerConfig(
            group=group.name,
            model=self._model,
            agent=_KV_AGENT_ID,
            dtype=self._settings.dtype,
            quantize=self._settings.quantize,
            context_length=self._settings.context_length or 0,
            page_size=self._settings.kv.page_size,
            num_threads=self._num_threads,
            max_batch_tokens=self._max_batch_tokens,
            device=group.devices[rank],
            deterministic=self._settings.deterministic,
            mem_fraction=self._settings.mem_fraction,
            memory_saver=self._settings.memory_saver,
            pool_in_worker=self._settings.pool_in_worker,
            tp_rank=rank,
            tp_size=group.tp_size,
            workers=group.worker_ids if group.tp_size > 1 else (),
        )

    @property
    def _max_batch_tokens(self) -> int:
        return max(2048, self._step_tokens)

    def _launch(self, actor_id: str, config: msgspec.Struct, **supervised: object) -> ActorLaunch:
        role = next(role for role, config_type in CONFIG_TYPES.items() if isinstance(config, config_type))
        supervision = self._settings.supervision
        # A process that was forked cannot use CUDA if anything before it in the family has.
        uses_cuda = self._settings.device != CPU and role in (roles.KV_AGENT, roles.WORKER)
        return ActorLaunch(
            actor_id=actor_id,
            role=role,
            kind=_kind(role, config),
            config=_overlay(role, config, self._settings.roles.get(role, {})),
            # Somebody waits until an actor is back, and an interpreter takes half a second to start.
            start="fork" if supervision.fork and not uses_cuda else "plain",
            drain_tier=_DRAIN_TIERS[role],
            supervised=supervised,
            start_timeout_s=max(supervision.start_timeout_s, _COMPILE_S if uses_cuda else 0.0),
        )


def _kind(role: str, config: msgspec.Struct) -> str:
    """Which actors do the same work: those of a role, of worker groups of one phase only, and rank by rank."""
    match config:
        case SchedulerConfig():
            return f"{config.phase} {role}"
        case WorkerConfig():
            return f"{config.group.rpartition('-')[0]} {role} {config.tp_rank}"
        case _:
            return role


def _overlay(role: str, config: msgspec.Struct, overrides: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration differs from the defaults, as plain data, with the user's own fields on top."""
    fields = {
        field.name: msgspec.to_builtins(getattr(config, field.name))
        for field in msgspec.structs.fields(config)
        if field.required or getattr(config, field.name) != field.default
    }
    for name in overrides:
        # One gateway on another port than `ps` and `up` look at would never be ready for them.
        if name in PLANNED and name in config.__struct_fields__:
            raise BadConfig(
                f"{name} cannot be set in [roles.{role}]",
                why="others go by it too",
                do=f"take it out; {PLANNED[name]} decides it for the whole mesh",
            )
    # The environment has words only.
    given = check_config(role, fields | overrides)
    return fields | {name: msgspec.to_builtins(getattr(given, name)) for name in overrides}


def check_config(role: str, fields: dict[str, Any]) -> msgspec.Struct:
    """The typed configuration of a role. Raises BadConfig."""
    if role not in CONFIG_TYPES:
        fault = unknown_name(role, CONFIG_TYPES, "role")
        raise BadConfig(f"there is no role {role}", why="it is none of those that a mesh is made of", do=fault.do)
    config_type = CONFIG_TYPES[role]
    fault = find_fault(fields, config_type, strict=False)
    missing = [field.name for field in msgspec.structs.fields(config_type) if field.required]
    missing = [name for name in missing if name not in fields]
    if missing:
        fault = Fault(f"{', '.join(missing)} is not given", "give it (`meshctl up --dry-run` prints whole lines)")
    if fault is None:
        try:
            return msgspec.convert(fields, config_type, strict=False)
        except ValueError as error:
            # Fields that are right one by one and not together.
            fault = Fault(str(error), "correct it")
    raise BadConfig(f"the configuration of a {role} cannot be used", why=fault.why, do=fault.do)
