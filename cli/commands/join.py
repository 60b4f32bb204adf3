"""`meshctl up --join TOKEN`: what a machine has to know about a mesh before it can be one of its hosts.

    token ──> own name, address, keys ──> ask the registry what it serves ──> the topology of this host

Everything is checked before anything starts; the mesh notices nothing until the host's actors join.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from cli.commands.keys import make_pair
from cli.errors import BadConfig, BadKeys, NotRunning, WrongUsage
from cli.plan.hosts import is_loopback
from cli.plan.joining import Joiner, joined_settings, plan_joiner
from cli.plan.keys import key_directory, key_files, pinned, read_allowed, read_own, words_to_add
from cli.plan.settings import Settings
from cli.plan.token import JoinToken, parse_token
from cli.supervisor.host_files import endpoint_at
from cli.supervisor.welcome import Asker
from mesh.address import Address
from mesh.membership.keys import HostKey
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.wire.frames import ListMembers, Members
from nodes.roles import REGISTRY

_CONNECT_S: Final = 2.0
_ANY_EPOCH: Final = 0


class Join:
    """One `--join`: the token and this host, checked without the mesh. Raises BadConfig, BadKeys, WrongUsage.

    Args:
        text: the token as it was given.
        file: the topology file, if one was named; a host that joins must have none.
        options: of the command line, by setting.
        environment: `os.environ`.
    """

    def __init__(
        self, text: str, file: Path | None, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        if file is not None:
            raise WrongUsage(
                "--join cannot be combined with a topology file",
                why=f"a host that joins takes its settings from the registry, not from {file}",
                do="leave out --file (KVMESH_TOPOLOGY), or start a host of that file with --host",
            )
        self.token = parse_token(text)
        self._environment = environment
        self._is_insecure = bool(options.get("insecure"))
        self._keys = key_directory(Settings(name=self.token.mesh, keys=options.get("keys") or ""), environment)
        own = read_own(self._keys) if self._has_keys else None
        options = {**options, "name": options.get("name") or environment.get("KVMESH_NAME")}
        options["host"] = options.get("host") or environment.get("KVMESH_HOST")
        named = own.host if own is not None else socket.gethostname()
        self.joiner: Joiner = plan_joiner(options, self.token, named, _routed_address(self.token))
        if own is not None and own.host != self.joiner.name:
            raise BadKeys(
                f"this host cannot join as {self.joiner.name}",
                why=f"the keys in {self._keys} belong to host {own.host}",
                do=f"leave out --host, or give {self.joiner.name} keys of its own: --keys DIR",
            )
        if not self.token.public_key and not self._is_insecure and not is_loopback(self.joiner.host.bind):
            raise BadConfig(
                f"the mesh {self.token.mesh!r} has no keys for its links",
                why="the token names no key, so nothing between this host and the others would be encrypted",
                do="pass --insecure if the network is trusted, or give the mesh keys (`meshctl keys new`)",
            )

    def settings(self, run: RunDirectory) -> Settings:
        """The mesh's settings with this host added; asks the registry. No living mesh may use `run`.

        Raises BadConfig, BadKeys, NotRunning.
        """
        token, name, host = self.token, self.joiner.name, self.joiner.host
        own = self._ready_keys() if self._has_keys else None
        keys = str(self._keys) if own is not None else ""
        run.write_host(HostRecord(name, host.bind, host.address, self._is_insecure, keys))
        told = self._ask(Asker(run, name))
        if not isinstance(told, Members):
            raise self._unanswered(own)
        where = f"{token.address}:{token.port}"
        if told.mesh != token.mesh:
            raise BadConfig(
                "the token is of another mesh",
                why=f"it is for {token.mesh!r}, but the registry at {where} is now that of {told.mesh!r}",
                do="get a new one: `meshctl keys token` on the registry's host",
            )
        if not told.settings:
            raise BadConfig(
                f"the mesh {token.mesh!r} accepts no further hosts",
                why=f"its registry at {where} has no settings for them",
                do="run the same release there, and give that mesh a topology file with hosts",
            )
        return joined_settings(token, self.joiner, told.settings, self._environment)

    def _ask(self, ask: Asker) -> object:
        before = structlog.get_config()
        # There is no log yet: the error says what happens on the link, without log lines beside it.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
        try:
            endpoint = endpoint_at(self.token.address, self.token.port)
            return asyncio.run(ask(Address(REGISTRY, _ANY_EPOCH), endpoint, ListMembers()))
        finally:
            structlog.configure(**before)

    @property
    def _has_keys(self) -> bool:
        return bool(self.token.public_key) and not self._is_insecure

    def _ready_keys(self) -> HostKey:
        """This host's pair, made if there is none, beside a list that has the registry's key."""
        token = self.token
        own = read_own(self._keys) or make_pair(self._keys, self.joiner.name, has_registry=False, force=False)
        known = read_allowed(self._keys)
        with key_files(self._keys) as files:
            if known is None or known.version == 0:
                files.write_allowed(pinned(own, token.host, token.public_key))
        if known is not None and known.version and known.registry().public_key != token.public_key:
            raise BadKeys(
                "the token is of another mesh",
                why=f"according to {self._keys}, the registry's host of {token.mesh!r} has another key than the token "
                "names",
                do="get a new token there, or remove that directory if the mesh was set up again",
            )
        return own

    def _unanswered(self, own: HostKey | None) -> BadKeys | NotRunning:
        token, where = self.token, f"{self.token.address}:{self.token.port}"
        try:
            with contextlib.closing(socket.create_connection((token.address, token.port), _CONNECT_S)):
                pass
        except OSError as error:
            return NotRunning(
                f"the registry of the mesh {token.mesh!r} cannot be reached",
                why=f"nothing answers at {where}: {error.strerror or error}",
                do="check that the mesh is running on that host, and that the network lets this host reach it",
            )
        if own is None:
            # A token with a key is of a mesh with keys: a new token would not help.
            needless = "leave out --insecure: the token has a key, so the mesh accepts no host without one"
            return NotRunning(
                f"the registry of the mesh {token.mesh!r} does not answer",
                why=f"something listens at {where}, but it is not a registry without keys",
                do=needless if token.public_key else "get a new token: `meshctl keys token` on the registry's host",
            )
        add = words_to_add(Settings(name=token.mesh), own.host, own.public_key)
        return BadKeys(
            f"the mesh {token.mesh!r} does not accept this host",
            why=f"its registry at {where} does not know the key of host {own.host}: {own.public_key}",
            do=f"on host {token.host}: `{add}`, then run this command here again",
        )


def _routed_address(token: JoinToken) -> str:
    """The address of this machine from which the registry is reached. Raises BadConfig."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(token.address, token.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only looks up the route.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadConfig(
            f"this machine cannot reach {token.address}",
            why=error.strerror or str(error),
            do="check that the name can be looked up and the network is up, or get a token with another address",
        ) from error
