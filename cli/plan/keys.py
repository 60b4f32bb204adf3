"""The keys that encrypt links between hosts: where this host has them, and whether they are the ones it needs.

    DIRECTORY/host.json      this host's own pair
    DIRECTORY/allowed.json   the hosts of the mesh: at the registry's host the list itself, elsewhere a copy

The files are those of `mesh/runtime/key_files.py`; `meshctl keys` and joining make them.
"""

import contextlib
import shlex
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from cli.errors import BadKeys
from cli.plan.settings import Settings
from mesh.errors import MeshError
from mesh.membership.keys import ALL_ROLES, AllowedHost, AllowList, HostKey
from mesh.runtime.key_files import DamagedKeyFile, KeyDirectory
from nodes.roles import REGISTRY

REGISTRY_ROLES: Final = (REGISTRY, ALL_ROLES)
"""Of the registry's host, which may have all the other roles too."""

ENCRYPTED: Final = "links between hosts are encrypted with the hosts' keys; KV pages between them are unencrypted"
INSECURE: Final = "insecure: links and KV pages between hosts are unencrypted, and whoever reaches the network can join"

_Content = TypeVar("_Content", HostKey, AllowList)


def key_directory(settings: Settings, environment: Mapping[str, str]) -> Path:
    """The directory of this host's keys for a mesh: as set, or in the user's configuration. Absolute."""
    if settings.keys:
        return Path(settings.keys).expanduser().absolute()
    base = Path(environment.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return base.absolute() / "kvmesh" / settings.name


class HostKeys(KeyDirectory):
    """The key files of a host for the mesh of `settings`; errors with them are raised as BadKeys, for people."""

    def __init__(self, settings: Settings, path: Path) -> None:
        super().__init__(path)
        self.settings = settings

    def pair(self) -> HostKey:
        own = self.read_key()
        if own is None:
            do = f"make them with `{self.words('new', '--host', 'NAME')}`, or say where they are: --keys DIR"
            raise BadKeys("this host has no keys", why=f"there are none in {self.path}", do=do)
        return own

    def known(self) -> AllowList:
        allowed, registry = self.read_allowed(), self.settings.registry_host
        if allowed is None:
            own = self.pair().host
            do = f"put it back, or start over with `{self.words_new(own, '--force')}`"
            if own != registry:
                do = f"say which key to trust: `{self.words_to_trust()}`, with the key that `meshctl keys ls` shows on "
                do += f"host {registry or 'HEAD'}"
            why = f"{self.path} has no allowed.json"
            raise BadKeys(f"host {own} does not know the keys of other hosts", why=why, do=do)
        return allowed

    def make(self, host: str, *, has_registry: bool, force: bool) -> HostKey:
        """Make a new pair for a host; on the registry's host also a list with it, or its new key in the present one.

        Raises BadKeys, for instance if there is a pair already.
        """
        known = None if force else self.read_key()
        if known is not None:
            why = f"they are in {self.path}, and other hosts may already rely on the public key"
            do = "keep them, or replace them with --force and add the new public key wherever the old one was added"
            raise BadKeys(f"host {known.host} already has keys", why=why, do=do)
        own = HostKey.new(host)
        allowed = (self.read_allowed() or AllowList(0, ())) if has_registry else None
        self.write_key(own)
        if allowed is not None:
            self.write_allowed(allowed.without(host).with_host(host, own.public_key, REGISTRY_ROLES))
        return own

    def words(self, *arguments: str) -> str:
        """A `meshctl keys` command for these keys, as it is typed on this host."""
        return shlex.join(["meshctl", "keys", *arguments, *_same_mesh(self.settings, here=True)])

    def words_new(self, host: str, *arguments: str) -> str:
        # The printed command names no topology file, from which this one knows where the registry is.
        registry = ("--registry",) if host == self.settings.registry_host else ()
        return self.words("new", "--host", host, *registry, *arguments)

    def words_to_trust(self) -> str:
        """The command that says which key the registry's host has."""
        registry = self.settings.registry_host or "HEAD"
        return words_to_add(self.settings, registry, "ITS_PUBLIC_KEY", "--roles", REGISTRY, here=True)

    @contextlib.contextmanager
    def refusing(self) -> Generator[None]:
        """Raise BadKeys for what is wrong with the content of the files, too."""
        try:
            yield
        except MeshError as error:
            do = "see `meshctl keys --help`"
            if isinstance(error, DamagedKeyFile):
                do = "put back what was there, or remove that file: then `meshctl up` says how to make it anew"
            raise BadKeys(f"the keys in {self.path} cannot be used", why=error.message, do=do) from error

    @override
    def _read(self, file: Path, kind: type[_Content]) -> _Content | None:
        with self.refusing():
            return super()._read(file, kind)

    @override
    def _write(self, file: Path, content: HostKey | AllowList) -> None:
        with self.refusing():
            super()._write(file, content)


def settle_keys(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings with `keys` as the directory in force; "" if links are plain, or there are none.

    Raises BadKeys if keys are needed and there are none, or if there are some that cannot be used.
    """
    host, registry, own = settings.on, settings.registry_host, settings.own_host
    plain = msgspec.structs.replace(settings, keys="")
    if own is None or settings.insecure:
        return plain
    keys = HostKeys(settings, key_directory(settings, environment))
    pair, what = keys.read_key(), f"host {host} cannot use the keys in {keys.path}"
    if pair is None and not settings.keys and all(host.is_on_loopback for host in settings.hosts.values()):
        return plain
    if pair is None:
        what = f"host {host} has no keys, and may not listen on {own.bind} without them"
        why = f"links between hosts are encrypted with keys, and there are none in {keys.path}"
        do = f"make them with `{keys.words_new(host)}`, or set insecure = true (--insecure) if the network is trusted"
    elif pair.host != host:
        why = f"they belong to host {pair.host}"
        do = f"give host {host} a directory of its own: --keys DIR, or KVMESH_KEYS"
    elif (granted := keys.known().registry()).host != registry:
        why = f"they belong to a mesh with the registry on host {granted.host}, but here it is on {registry}"
        do = "correct which host has `registry = true`, or give another --keys DIR"
    elif host == registry and granted.public_key != pair.public_key:
        why = "host.json and allowed.json have different public keys for it"
        do = f"put the right file back, or make new keys with `{keys.words_new(host, '--force')}`"
    else:
        return msgspec.structs.replace(settings, keys=str(keys.path))
    raise BadKeys(what, why=why, do=do)


def links_note(settings: Settings) -> str:
    """What people should know about links between hosts, from settled settings; "" if there are no such links."""
    if not settings.hosts:
        return ""
    if settings.keys:
        return ENCRYPTED
    return INSECURE if settings.insecure else "links and KV pages between hosts are unencrypted, but on loopback only"


def pinned(own: HostKey, registry: str, public_key: str) -> AllowList:
    """The list of a host that has been told the key of the registry's host and nothing else: version 0.

    Any list that the registry's host sends is newer. Raises MeshError if the key is not one, or is this host's own.
    """
    hosts = (AllowedHost(registry, public_key, REGISTRY_ROLES), AllowedHost(own.host, own.public_key))
    known = AllowList(0, hosts)
    known.check()
    return known


def words_to_add(settings: Settings, host: str, public_key: str, *arguments: str, here: bool = False) -> str:
    """The command that adds a key; `here`: on this host, in its directory of keys.

    A key is always in quotes, also one that stands for another, since most need them.
    """
    rest = [*arguments, *_same_mesh(settings, here=here)]
    return " ".join([shlex.join(["meshctl", "keys", "add", host]), f"'{public_key}'", *map(shlex.quote, rest)])


def _same_mesh(settings: Settings, *, here: bool) -> list[str]:
    name = ["--name", settings.name] if settings.name != "default" else []
    # Another host has a directory of its own, which is not known here.
    return name + (["--keys", str(key_directory(settings, {}))] if here and settings.keys else [])
