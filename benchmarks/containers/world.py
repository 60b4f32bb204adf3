"""Containers as the hosts of a mesh: started, inspected, paused, killed and cut off; everything created is removed."""

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.containers.image import podman

SHARED_MEMORY = "1g"
STOP_S = 40


class Container:
    """One container. Others on its network reach it by `name`."""

    def __init__(self, world: "World", name: str, options: list[str], command: list[str]) -> None:
        self.name = name
        self.full_name = f"{world.prefix}-{name}"
        self.options = options
        self.command = command
        self._world = world

    def start(self) -> None:
        """Create and start it, without any file of an earlier container of its name."""
        network = ["--network", self._world.network, "--network-alias", self.name]
        options = ["--detach", "--name", self.full_name, "--hostname", self.name, "--shm-size", SHARED_MEMORY]
        podman("run", *options, *network, *self.options, self._world.image, *self.command)

    def kill(self) -> None:
        """Kill all its processes at once, then remove its files."""
        podman("rm", "--force", "--time", "0", self.full_name)

    def stop(self) -> int:
        """Stop it by SIGTERM; returns the exit code of process 1."""
        podman("stop", "--time", str(STOP_S), self.full_name, timeout_s=STOP_S + 20)
        return int(self.inspect("{{.State.ExitCode}}"))

    def exec(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in it, to its end."""
        return podman("exec", self.full_name, *command, check=check, timeout_s=timeout_s)

    def meshctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a `meshctl` command inside it."""
        return self.exec("meshctl", *arguments, check=check)

    def ps(self) -> dict[str, dict[str, Any]]:
        """Entries of `ps -o json` by actor id."""
        return {entry["actor_id"]: entry for entry in json.loads(self.meshctl("ps", "-o", "json").stdout)}

    def is_healthy(self) -> bool:
        """Run its health check once."""
        return podman("healthcheck", "run", self.full_name, check=False).returncode == 0

    def inspect(self, template: str) -> str:
        """One field, as a Go template."""
        return podman("inspect", "--format", template, self.full_name).stdout.strip()

    def logs(self) -> str:
        """The output of process 1."""
        done = podman("logs", self.full_name, check=False)
        return done.stdout + done.stderr

    def port(self, inside: int = 8000) -> int:
        """The port on this machine's loopback at which `inside` is published."""
        return int(podman("port", self.full_name, f"{inside}/tcp").stdout.split(":")[-1])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """None of its processes runs meanwhile."""
        # On a busy machine runc gives up once in hundreds of times ("unable to freeze"), without any change made.
        for is_last in (False, False, True):
            if podman("pause", self.full_name, check=is_last).returncode == 0:
                break
        try:
            yield
        finally:
            podman("unpause", self.full_name)

    @contextlib.contextmanager
    def cut_off(self, *others: "Container") -> Iterator[None]:
        """Packets from and to `others`, or all but its own loopback's, are dropped meanwhile. Needs root."""
        wheres = [["--source", one.address()] for one in others] or [["!", "--in-interface", "lo"]]
        rules = [["INPUT", *where, "--jump", "DROP"] for where in wheres]
        rules += [
            ["OUTPUT", *where, "--jump", "DROP"]
            for where in [["--destination", one.address()] for one in others] or [["!", "--out-interface", "lo"]]
        ]
        for rule in rules:
            self._iptables("--insert", *rule)
        try:
            yield
        finally:
            for rule in rules:
                self._iptables("--delete", *rule)

    @contextlib.contextmanager
    def disconnected(self) -> Iterator[None]:
        """Its interface is taken away meanwhile."""
        podman("network", "disconnect", self._world.network, self.full_name)
        try:
            yield
        finally:
            podman("network", "connect", "--alias", self.name, self._world.network, self.full_name)

    def address(self) -> str:
        """Its address on the network of the mesh."""
        return self.inspect(f'{{{{(index .NetworkSettings.Networks "{self._world.network}").IPAddress}}}}')

    def _iptables(self, *arguments: str) -> None:
        inside = ["nsenter", "--target", self.inspect("{{.State.Pid}}"), "--net"]
        subprocess.run([*inside, "iptables", "--wait", *arguments], check=True, capture_output=True, timeout=20)


class World:
    """A private network with containers on it."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.prefix = f"kvmesh-test-{uuid.uuid4().hex[:8]}"
        self.network = f"{self.prefix}-net"
        self.containers: dict[str, Container] = {}
        self._volumes: list[str] = []
        podman("network", "create", self.network)

    def container(self, name: str, *command: str, options: tuple[str, ...] = ()) -> Container:
        """Create and start a container."""
        made = self.containers[name] = Container(self, name, list(options), list(command))
        made.start()
        return made

    def volume(self, name: str) -> str:
        """Create a volume, which outlives containers; returns its full name."""
        full_name = f"{self.prefix}-{name}"
        podman("volume", "create", full_name)
        self._volumes.append(full_name)
        return full_name

    def run(self, *command: str, options: tuple[str, ...] = ()) -> None:
        """Run a command in a container that is removed when it ends."""
        podman("run", "--rm", "--network", "none", *options, self.image, *command)

    def remove(self) -> None:
        """Remove everything, whatever state it is in."""
        for one in self.containers.values():
            # A frozen cgroup cannot be killed.
            podman("unpause", one.full_name, check=False)
            podman("rm", "--force", "--time", "0", one.full_name, check=False)
        podman("network", "rm", "--force", self.network, check=False)
        for volume in self._volumes:
            podman("volume", "rm", "--force", volume, check=False)
        left = podman("ps", "--all", "--quiet", "--filter", f"name={self.prefix}").stdout
        assert not left, f"containers were left behind: {left}"

    def keep_logs(self, directory: Path) -> None:
        """Write each container's output, and its actors' logs, into files."""
        for name, one in self.containers.items():
            (directory / f"{name}.log").write_text(one.logs())
            said = one.exec("sh", "-c", "cat /tmp/kvmesh-*/*/logs/*.log", check=False)
            (directory / f"{name}.actors.log").write_text(said.stdout)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until `condition` is true: nothing inside a container can notify us."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"this did not happen within {timeout_s} s: {what}"
        time.sleep(0.2)
    return result


def may_cut_packets() -> bool:
    """Whether a container's packets can be dropped from here."""
    return os.geteuid() == 0
