"""Which actors make up a mesh, or one host of it, and how each is configured: a list of launches. Pure.

Called by `meshctl up` (which starts the list, or prints it with `--dry-run`) and by `meshctl config`.
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from cli.errors import BadConfig
from cli.plan.devices import DeviceMemory, check_device_options
from cli.plan.disk import DiskFound, plan_disk
from cli.plan.groups import WorkerGroup, plan_groups
from cli.plan.limits import Load, Need, needs, num_connections
from cli.plan.names import agent_id, on_host
from cli.plan.notes import topology_notes
from cli.plan.overrides import configured, overlay
from cli.plan.pools import PoolPlan, context_elsewhere
from cli.plan.role_configs import BUILT_IN
from cli.plan.settings import Settings
from cli.plan.spec import host_spec, shared_settings
from cli.plan.store import plan_store
from cli.release import release
from cli.supervisor.kept.mesh_directory import REQUESTS, segment_prefix
from kvstore.pool.device import CPU
from kvstore.transfer.paired.tcp.link import TCP, TcpSettings
from mesh.runtime.process_limits import Limits
from mesh.runtime.run_directory import RunDirectory
from nodes import roles
from nodes.context_length import ServedContext
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.kv_agent.config import KVAgentConfig, PoolConfig
from nodes.model_spec import ModelSpec
from nodes.model_spec.end_tokens import describe_ends
from nodes.registry.config import RegistryConfig
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig

_TORCH_MODULE: Final = "nodes.worker.ops.torch.load"

_COMPILE_S: Final = 1200.0
"""The first start on a host compiles FlashInfer's kernels, minutes each on a few cores."""

Start = Literal["plain", "fork"]


class ActorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One actor to start. `start`: `plain` is a new interpreter, `fork` is forked from the warm zygote.

    `config` is its configuration when it runs alone, `supervised` what is added under a supervisor.
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
        return self.config | self.supervised


class Machine(NamedTuple):
    """What the plan depends on besides settings and model. `devices`: those that the settings name, if any;
    `limits` are those of the system for processes. `disk`: where pages are kept, if anywhere.
    """

    num_cores: int
    pool_free_bytes: int
    uid: int
    devices: tuple[DeviceMemory, ...] = ()
    limits: Limits = Limits({}, {})
    disk: DiskFound | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A whole mesh, or one host's part of it. `pool_bytes` is what all KV pools take in the settings' directory, in
    files whose names begin with `pool_prefix`; pools on a device have only their page tables there.

    `ends` are the end tokens and who names them, in words.

    `gateway` are the fields of a gateway's configuration, whether or not one is among the `actors`.
    `preloads` are the modules that the zygote imports, `notes` what people should know before the mesh starts. `spec`
    is what all hosts have in common, empty on a mesh of one host. `vectors`: what a model that makes no text makes
    (`Pooling.kind`). `needs` is what the host's limits for processes have to allow.
    """

    settings: Settings
    model_name: str
    actors: list[ActorLaunch]
    num_threads: int
    pool_prefix: str
    pool_bytes: int
    context: ServedContext
    preloads: list[str]
    gateway: dict[str, Any]
    ends: str = ""
    notes: list[str] = []
    spec: dict[str, str] = {}
    vectors: str = ""
    needs: list[Need] = []

    @property
    def limits(self) -> str:
        # A vector is no answer that could end.
        return str(self.context) if self.vectors else f"{self.context}\nends with {self.ends or 'no token'}"

    @property
    def has_gateway(self) -> bool:
        return any(launch.role == roles.GATEWAY for launch in self.actors)

    @property
    def start_timeout_s(self) -> float | None:
        """After so long without progress the whole start is over; None where it may wait for the registry's host."""
        if self.settings.on != self.settings.registry_host:
            return None
        return max((launch.start_timeout_s for launch in self.actors), default=None)

    @property
    def gateway_host(self) -> str:
        """The other host that clients connect to; "" if they connect to this one, or it knows of no gateway."""
        hosts = {} if self.has_gateway else self.settings.hosts
        return next((name for name, host in hosts.items() if host.gateways), "")

    @property
    def url(self) -> str:
        """Where clients connect; works only on the gateway's own host if that listens on loopback only.

        "" on a mesh of one host without a gateway: an engine's.
        """
        if not self.has_gateway and not self.settings.hosts:
            return ""
        host = self.settings.host
        if host in ("0.0.0.0", "::"):
            loopback = "127.0.0.1" if host == "0.0.0.0" else "::1"
            host = self.settings.hosts[self.gateway_host].address if self.gateway_host else loopback
        return f"http://[{host}]:{self.settings.port}" if ":" in host else f"http://{host}:{self.settings.port}"

    @property
    def forks(self) -> bool:
        return any(launch.start == "fork" for launch in self.actors)


def plan_topology(settings: Settings, spec: ModelSpec, model: str, machine: Machine, origin: str = "") -> Topology:
    """The mesh that `settings` ask for; `model` is how actors find `spec`.

    Raises BadConfig, NoMemory, LimitTooLow.

    `origin` is what clients are told instead of `model` about where it comes from: a repository and its commit.
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
        most = max(spec.max_context_length, spec.context_length)
        if settings.context_length is not None and settings.context_length > most:
            why = f" ({spec.max_context_reason})" if spec.max_context_reason else ""
            raise BadConfig(
                f"a context of {settings.context_length} tokens cannot be served",
                why=f"{spec.name} was made for {most}{why}",
                do="give a --context-length of at most that",
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
        # Cores are divided up: two workers of two threads each on 2 cores took 108 ms for a layer's step of 4 ms.
        num_workers = sum(group.tp_size for group in self._groups)
        self._num_threads = settings.threads or max(1, machine.num_cores // max(1, num_workers))
        check_device_options(settings, max((group.tp_size for group in self._groups), default=1))
        self._prefix = segment_prefix(machine.uid, settings.name, settings.on)
        self._agent_id = agent_id(settings.on)

    def plan(self) -> Topology:
        settings, counts = self._settings, self._settings.own_counts
        pools: list[PoolConfig] = []
        sizes: list[int] = []
        if not self._groups:
            context = context_elsewhere(settings, self._spec)
        else:
            plan = PoolPlan(settings, self._spec, self._groups, self._machine.pool_free_bytes, self._machine.devices)
            pools = plan.pools(self._max_batch_tokens)
            sizes, context = plan.require_room(pools), plan.context(pools)
        spec = host_spec(settings, self._spec, context, release()) if settings.on else {}
        actors: list[ActorLaunch] = []
        if settings.on == settings.registry_host:
            # On several hosts it has to be found before anything else is known about the mesh.
            registry = RegistryConfig()
            if settings.on:
                told = shared_settings(settings, self._origin or self._model)
                registry = RegistryConfig(port=settings.registry_port, spec=spec, settings=told)
            actors.append(self._launch("registry", registry))
        gateway = self._gateway(context)
        actors += self._several("gateway", counts.gateways, gateway)
        if self._groups:
            # The supervisor removes the segments at the end; until then the next agent finds them.
            actors.append(self._launch(self._agent_id, self._kv_agent(pools), unlink_on_stop=False))
        tokenizer = configured(TokenizerConfig, settings, model=self._model, context_length=context.length)
        actors += self._several("tokenizer", counts.tokenizers, tokenizer)
        actors += self._several("detokenizer", counts.detokenizers, DetokenizerConfig(model=self._model))
        for group in self._groups:
            for rank, worker_id in enumerate(group.worker_ids):
                actors.append(self._launch(worker_id, self._worker(group, rank)))
            actors.append(self._launch(f"scheduler-{group.name}", self._scheduler(group, context.length)))
        self._check_ports(actors)
        return Topology(
            settings=settings,
            model_name=self._served_names[0],
            actors=actors,
            num_threads=self._num_threads,
            pool_prefix=self._prefix,
            pool_bytes=sum(sizes),
            context=context,
            preloads=self._preloads(actors),
            gateway=overlay(roles.GATEWAY, gateway, self._overrides(roles.GATEWAY, gateway)),
            ends=describe_ends(self._spec),
            notes=self._notes(actors),
            spec=spec,
            needs=needs(settings, self._load(actors, sizes)),
            vectors=self._spec.pooling.kind if self._spec.pooling is not None and not self._spec.has_head else "",
        )

    def _load(self, actors: list[ActorLaunch], pools: list[int]) -> Load:
        elsewhere = [host for name, host in self._settings.hosts.items() if name != self._settings.on]
        # A supervisor and an agent on each, workers and their scheduler in each group.
        num = sum(2 + host.gateways + host.tokenizers + host.detokenizers + 2 * sum(host.groups) for host in elsewhere)
        return Load(
            actors=[(launch.actor_id, launch.role) for launch in actors],
            num_elsewhere=num,
            num_threads=self._num_threads,
            pools=pools,
            uses_torch=self._spec.source != "echo",
        )

    def _check_ports(self, actors: list[ActorLaunch]) -> None:
        own = self._settings.own_host
        if own is None or own.port_range is None:
            return
        first, last = own.port_range
        # Two for each actor and for the supervisor; the registry has ports of its own.
        needed = 2 * sum(launch.role != roles.REGISTRY for launch in actors) + 2
        if last - first + 1 < needed:
            raise BadConfig(
                f"ports {own.ports} are too few for host {self._settings.on}",
                why=f"what runs there listens on {needed}, two for each actor and for the supervisor",
                do=f"give it {first}-{first + 2 * needed - 1} (ports in its table, or --ports): restarting actors "
                "briefly use extra ports",
            )

    def _notes(self, actors: list[ActorLaunch]) -> list[str]:
        gateway = next((launch.config for launch in actors if launch.role == roles.GATEWAY), None)
        config = msgspec.convert(gateway, GatewayConfig) if gateway is not None else None
        return topology_notes(self._settings, config, num_connections(self._machine.limits, len(actors)))

    def _several(self, name: str, count: int, config: msgspec.Struct) -> list[ActorLaunch]:
        return [self._launch(on_host(f"{name}-{number}", self._settings.on), config) for number in range(count)]

    def _kv_agent(self, pools: list[PoolConfig]) -> KVAgentConfig:
        settings = self._settings
        disk = plan_disk(settings, [pool.layout for pool in pools], self._spec, self._machine.disk)
        store = plan_store(settings, self._spec)
        config = KVAgentConfig(
            pools=pools, directory=settings.kv.directory, prefix=self._prefix, disk=disk, store=store
        )
        host = settings.own_host
        if host is None or len(settings.hosts) == 1:
            return config
        # With keys, too: an agent that connects proves a secret of the pair, but its bytes are as plain as without.
        trusted = settings.insecure or bool(settings.keys)
        tcp = TcpSettings(host=host.address, bind=host.bind, trusted_network=trusted)
        # Pages on devices go the same way: the default transport is for agents of one host.
        device_transport = config.device_transport if settings.device == CPU else TCP
        return msgspec.structs.replace(config, host_transport=TCP, device_transport=device_transport, tcp=tcp)

    def _preloads(self, actors: list[ActorLaunch]) -> list[str]:
        forked = {launch.role for launch in actors if launch.start == "fork"}
        modules = [BUILT_IN[role].module for role in forked]
        if roles.WORKER in forked and self._spec.source != "echo":
            modules.append(_TORCH_MODULE)
        return sorted(modules)

    def _gateway(self, context: ServedContext) -> GatewayConfig:
        settings = self._settings
        settings.check_parsers()
        return configured(
            GatewayConfig,
            settings,
            model_name=self._served_names[0],
            aliases=self._served_names[1:],
            sampling_defaults=self._spec.sampling_defaults,
            context_length=context.length,
            context=context,
            model=self._origin or self._model,
            quantization=settings.quantize,
            vocab_size=self._spec.vocab_size,
            fill_in=self._spec.fill_in,
            template_reads=self._spec.template_reads,
            pooling=self._spec.pooling,
            makes_text=self._spec.has_head,
            hidden_size=self._spec.hidden_size if self._spec.pooling is not None else 0,
            cors_origins=settings.allowed_origins,
            trusted_proxies=settings.proxies,
            # What all hosts of a mesh have in common, and no other mesh has.
            client_salt=settings.name,
            control=settings.control and bool(settings.own_counts.gateways),
            request_log_folder=str(RunDirectory.of_mesh(settings.name).path / REQUESTS),
            responses_file=self._responses_file(settings) if settings.responses_store_bytes else "",
            responses_store_bytes=settings.responses_store_bytes,
            otel_endpoint=settings.collector,
            # Several gateways share the port; a single one must not share it with a stranger.
            reuse_port=settings.own_counts.gateways > 1,
        )

    def _responses_file(self, settings: Settings) -> str:
        # Hosts of a mesh may share a directory.
        name = f"responses.{settings.on}.sqlite" if settings.on else "responses.sqlite"
        return str(RunDirectory.of_mesh(settings.name).path / name)

    def _scheduler(self, group: WorkerGroup, context_length: int) -> SchedulerConfig:
        settings = self._settings
        chunk, page_size = self._chunk_tokens, settings.kv.page_size
        if chunk % page_size:
            raise BadConfig(
                f"a prefill chunk of {chunk} tokens cannot be used",
                why=f"it is not a multiple of the page of {page_size} tokens",
                do=f"give --chunk {max(1, chunk // page_size) * page_size}, for example",
            )
        return configured(
            SchedulerConfig,
            settings,
            group=group.name,
            worker=group.worker_ids[0],
            workers=group.worker_ids if group.tp_size > 1 else (),
            agent=self._agent_id,
            context_length=context_length,
            phase=group.phase,
            eos_token_ids=self._spec.eos_token_ids,
            page_size=page_size,
            step_tokens=self._step_tokens,
            chunk_tokens=chunk,
            is_encoder=self._spec.is_encoder,
            max_step_s=settings.max_step_s,
            stores=settings.kv.stores,
        )

    @property
    def _chunk_tokens(self) -> int:
        chunk, page_size = self._settings.chunk_tokens, self._settings.kv.page_size
        if not self._spec.is_encoder:
            return chunk
        # All of an input, since each position sees all others.
        longest = self._settings.context_length or self._spec.context_length
        return max(chunk // page_size, -(-longest // page_size)) * page_size

    @property
    def _step_tokens(self) -> int:
        # Room for a whole chunk beside a full batch that decodes: neither then waits for the other.
        return max(self._chunk_tokens + self._settings.max_running, 512)

    def _worker(self, group: WorkerGroup, rank: int) -> WorkerConfig:
        return configured(
            WorkerConfig,
            self._settings,
            group=group.name,
            model=self._model,
            agent=self._agent_id,
            weights=self._spec.weights,
            context_length=self._settings.context_length or 0,
            page_size=self._settings.kv.page_size,
            num_threads=self._num_threads,
            max_batch_tokens=self._max_batch_tokens,
            device=group.devices[rank],
            tp_rank=rank,
            tp_size=group.tp_size,
            workers=group.worker_ids if group.tp_size > 1 else (),
            end_token_ids=self._spec.eos_token_ids,
        )

    @property
    def _max_batch_tokens(self) -> int:
        return max(2048, self._step_tokens)

    def _overrides(self, role: str, config: msgspec.Struct) -> dict[str, Any]:
        given = self._settings.roles.get(role, {})
        if isinstance(config, KVAgentConfig) and "tcp" in given:
            # Where it listens follows from the host, and stays so if only the number of streams, say, is set.
            return given | {"tcp": msgspec.to_builtins(config.tcp) | given["tcp"]}
        return given

    def _launch(self, actor_id: str, config: msgspec.Struct, **supervised: object) -> ActorLaunch:
        role = next(role for role, built_in in BUILT_IN.items() if isinstance(config, built_in.config))
        supervision = self._settings.supervision
        # A forked process cannot use CUDA if one of its ancestors has.
        uses_cuda = self._settings.device != CPU and role in (roles.KV_AGENT, roles.WORKER)
        return ActorLaunch(
            actor_id=actor_id,
            role=role,
            kind=_kind(role, config),
            config=overlay(role, config, self._overrides(role, config)),
            # Requests wait until an actor is back, and an interpreter takes half a second to start.
            start="fork" if supervision.fork and not uses_cuda else "plain",
            drain_tier=BUILT_IN[role].drain_tier,
            supervised=supervised,
            start_timeout_s=max(supervision.start_timeout_s, _COMPILE_S if uses_cuda else 0.0),
        )


def _kind(role: str, config: msgspec.Struct) -> str:
    """Actors of one kind do the same work: they have the same role, and for worker groups the same phase and rank."""
    match config:
        case SchedulerConfig():
            return f"{config.phase} {role}"
        case WorkerConfig():
            return f"{config.group.partition('-')[0]} {role} {config.tp_rank}"
        case _:
            return role
