"""The mesh of compose.yaml without compose: head, prefill and decode, each in a container of its own on one network."""

import json
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from benchmarks.containers.image import ROOT
from benchmarks.containers.world import Container, World, wait_until

HEAD: Final = "head"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
HOSTS: Final = (HEAD, PREFILL, DECODE)

TOPOLOGY: Final = "/etc/kvmesh/mesh.toml"
_NEEDED: Final = frozenset(
    {
        "registry",
        "gateway-0.head",
        "tokenizer-0.head",
        "detokenizer-0.head",
        *(f"supervisor.{host}" for host in HOSTS),
        *(f"kv-agent-0.{host}" for host in (PREFILL, DECODE)),
        *(f"{role}-{host}-0.{host}" for role in ("scheduler", "worker") for host in (PREFILL, DECODE)),
    }
)
"""The actors that must be there before anything is done to the mesh."""


class HostMesh:
    """Three hosts, observed and struck from outside. `options` are given to podman for those hosts' containers."""

    def __init__(self, world: World, options: Mapping[str, Sequence[str]] | None = None) -> None:
        self.world = world
        more = options or {}
        # No actor is given up: the restart budget is tested elsewhere.
        every = (
            "--volume",
            f"{ROOT}/deploy/mesh.toml:{TOPOLOGY}:ro",
            "--env",
            "KVMESH_SUPERVISION__RESTART_BUDGET=100000",
        )
        keys = {host: (f"{world.volume(f'keys-{host}')}:/keys/{host}") for host in HOSTS}
        mounts = [part for mount in keys.values() for part in ("--volume", mount)]
        world.run("keys", "new", "--all-hosts", "--file", TOPOLOGY, "--keys", "/keys", options=(*every, *mounts))
        for host in HOSTS:
            publish = ("--publish", "127.0.0.1::8000") if host == HEAD else ()
            command = ("up", "--file", TOPOLOGY, "--host", host, "--keys", f"/keys/{host}")
            own = ("--volume", keys[host], *more.get(host, ()))
            world.container(host, *command, options=(*every, *publish, *own))
        self.port = self[HEAD].port()

    @classmethod
    def settled_in(cls, world: World, options: Mapping[str, Sequence[str]] | None = None) -> Self:
        """A mesh that serves."""
        made = cls(world, options)
        made.settled(120.0)
        return made

    def __getitem__(self, host: str) -> Container:
        return self.world.containers[host]

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` of the gateway, which asks all actors. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def actors(self) -> dict[str, dict[str, Any]]:
        """Actors of all hosts, as the head's supervisor lists them; empty if it does not answer."""
        try:
            return self[HEAD].ps()
        except (AssertionError, json.JSONDecodeError, subprocess.TimeoutExpired):
            return {}

    def settled(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Epochs of all actors, once every one is ready and answers a scrape."""

        def look() -> dict[str, int]:
            actors = {name: one for name, one in self.actors().items() if one["role"] != "meshctl"}
            if not actors.keys() >= _NEEDED or any(one["state"] != "ready" for one in actors.values()):
                return {}
            try:
                samples = self.metrics()
            except OSError:
                return {}
            answered = {name for name in _NEEDED if any(f'actor="{name}"' in sample for sample in samples)}
            missing = {name for name in _NEEDED - answered if not name.startswith(("supervisor", "registry"))}
            return {} if missing else {name: one["epoch"] for name, one in actors.items()}

        return wait_until(look, "every actor of every host is ready", timeout_s)

    def remake(self, host: str) -> None:
        """Kill a host, and recreate it with its id and its volumes, and without its other files."""
        self[host].kill()
        self[host].start()

    def kill_registry(self) -> None:
        """SIGKILL the registry, from inside its container."""
        pid = self.actors()["registry"]["pid"]
        self[HEAD].exec("sh", "-c", f"kill -9 {pid}")

    def pulled_bytes(self, transport: str) -> float:
        """Bytes that agents have pulled by a transport since they started."""
        return self.total("mesh_kv_pulled_bytes_total", f'transport="{transport}"')

    def total(self, name: str, *labels: str) -> float:
        """The sum of the samples of a metric that have all of these labels, like `actor="kv-agent-0.decode"`."""
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.startswith(f"{name}{{") and all(label in sample for label in labels)
        )
