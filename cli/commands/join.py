"""`meshctl up --join TOKEN`: what a machine has to know about a mesh before it can be one of its hosts.

    token ──> own name, address, keys ──> ask the registry what it serves ──> the topology of this host

Everything is checked before anything starts; the mesh notices nothing until the host's actors join.
"""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.errors import BadConfig, BadKeys, NotRunning, WrongUsage
from cli.plan.hosts import is_loopback
from cli.plan.joining import Joiner, joined_settings, plan_joiner
from cli.plan.keys import HostKeys, key_directory, pinned, words_to_add
from cli.plan.settings import Settings
from cli.plan.token import JoinToken, parse_token
from cli.supervisor.hosts.welcome import Asker, unreachable
from cli.supervisor.kept.host_files import SOME_REGISTRY, endpoint_at
from mesh.membership.keys import HostKey
from mesh.runtime.plain_structlog import structlog
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.wire.frames import ListMembers, Members


class Join:
    """One `--join`: the token `text` and this host, checked without the mesh.

    `options` are the command line's, by setting. Raises BadConfig, BadKeys, WrongUsage.
    """

    def __init__(
        self, text: str, file: Path | None, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        if file is not None:
            why = f"a host that joins takes its settings from the registry, not from {file}"
            do = "leave out --file (KVMESH_TOPOLOGY), or start a host of that file with --host"
            raise WrongUsage("--join cannot be combined with a topology file", why=why, do=do)
        token = self.token = parse_token(text)
        self._environment = environment
        self._is_insecure = bool(options.get("insecure"))
        settings = Settings(name=token.mesh, keys=options.get("keys") or "")
        self._keys = HostKeys(settings, key_directory(settings, environment))
        self._has_keys = bool(token.public_key) and not self._is_insecure
        own = self._keys.read_key() if self._has_keys else None
        said = {name: options.get(name) or environment.get(f"KVMESH_{name.upper()}") for name in ("name", "host")}
        named = own.host if own is not None else socket.gethostname()
        self.joiner: Joiner = plan_joiner({**options, **said}, token, named, _routed_address(token))
        if own is not None and own.host != self.joiner.name:
            why = f"the keys in {self._keys.path} belong to host {own.host}"
            do = f"leave out --host, or give {self.joiner.name} keys of its own: --keys DIR"
            raise BadKeys(f"this host cannot join as {self.joiner.name}", why=why, do=do)
        if not token.public_key and not self._is_insecure and not is_loopback(self.joiner.host.bind):
            why = "the token names no key, so nothing between this host and the others would be encrypted"
            do = "pass --insecure if the network is trusted, or give the mesh keys (`meshctl keys new`)"
            raise BadConfig(f"the mesh {token.mesh!r} has no keys for its links", why=why, do=do)

    def settings(self, run: RunDirectory) -> Settings:
        """The mesh's settings with this host added; asks the registry. No living mesh may use `run`.

        Raises BadConfig, BadKeys, NotRunning.
        """
        token, name, host = self.token, self.joiner.name, self.joiner.host
        own = self._ready_keys() if self._has_keys else None
        keys = str(self._keys.path) if own is not None else ""
        run.write_host(HostRecord(name, host.bind, host.address, self._is_insecure, keys))
        before = structlog.get_config()
        # There is no log yet: the error says what happens on the link, without log lines beside it.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
        try:
            told = asyncio.run(Asker(run, name)(SOME_REGISTRY, endpoint_at(token.address, token.port), ListMembers()))
        finally:
            structlog.configure(**before)
        where = f"{token.address}:{token.port}"
        if not isinstance(told, Members):
            raise self._unanswered(own, where)
        if told.mesh != token.mesh:
            why = f"it is for {token.mesh!r}, but the registry at {where} is now that of {told.mesh!r}"
            do = "get a new one: `meshctl keys token` on the registry's host"
            raise BadConfig("the token is of another mesh", why=why, do=do)
        if not told.settings:
            why = f"its registry at {where} has no settings for them"
            do = "run the same release there, and give that mesh a topology file with hosts"
            raise BadConfig(f"the mesh {token.mesh!r} accepts no further hosts", why=why, do=do)
        return joined_settings(token, self.joiner, told.settings, self._environment)

    def _ready_keys(self) -> HostKey:
        """This host's pair, made if there is none, beside a list that has the registry's key."""
        token, keys = self.token, self._keys
        own = keys.read_key() or keys.make(self.joiner.name, has_registry=False, force=False)
        known = keys.read_allowed()
        if known is None or known.version == 0:
            with keys.refusing():
                keys.write_allowed(pinned(own, token.host, token.public_key))
        elif known.registry().public_key != token.public_key:
            why = (
                f"according to {keys.path}, the registry's host of {token.mesh!r} has another key than the token names"
            )
            do = "get a new token there, or remove that directory if the mesh was set up again"
            raise BadKeys("the token is of another mesh", why=why, do=do)
        return own

    def _unanswered(self, own: HostKey | None, where: str) -> BadKeys | NotRunning:
        token, kind = self.token, NotRunning
        if fault := unreachable(token.address, token.port):
            what, why = (
                f"the registry of the mesh {token.mesh!r} cannot be reached",
                f"nothing answers at {where}: {fault}",
            )
            do = "check that the mesh is running on that host, and that the network lets this host reach it"
        elif own is not None:
            kind, what = BadKeys, f"the mesh {token.mesh!r} does not accept this host"
            why = f"its registry at {where} does not know the key of host {own.host}: {own.public_key}"
            add = words_to_add(self._keys.settings, own.host, own.public_key)
            do = f"on host {token.host}: `{add}`, then run this command here again"
        else:
            what = f"the registry of the mesh {token.mesh!r} does not answer"
            why = f"something listens at {where}, but it is not a registry without keys"
            do = "get a new token: `meshctl keys token` on the registry's host"
            if token.public_key:
                # It is of a mesh with keys: a new token would not help.
                do = "leave out --insecure: the token has a key, so the mesh accepts no host without one"
        return kind(what, why=why, do=do)


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
