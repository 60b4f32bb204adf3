"""The keys that encrypt links between hosts: where this host has them, and whether they are the ones it needs.

    DIRECTORY/host.json      this host's own pair
    DIRECTORY/allowed.json   the hosts of the mesh: at the registry's host the list itself, elsewhere a copy

Reads those files (`mesh/runtime/key_files.py`) and decides nothing else; `meshctl keys` makes them.
"""

import contextlib
import shlex
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import msgspec

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


def key_directory(settings: Settings, environment: Mapping[str, str]) -> Path:
    """The directory of this host's keys for a mesh: as set, or in the user's configuration. Absolute."""
    if settings.keys:
        return Path(settings.keys).expanduser().absolute()
    base = Path(environment.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return base.absolute() / "kvmesh" / settings.name


def settle_keys(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings with `keys` as the directory in force; "" if links are plain, or there are none.

    Raises BadKeys if keys are needed and there are none, or if there are some that cannot be used.
    """
    host = settings.own_host
    if host is None or settings.insecure:
        return msgspec.structs.replace(settings, keys="")
    path = key_directory(settings, environment)
    own = read_own(path)
    if own is None:
        if not settings.keys and all(one.is_on_loopback for one in settings.hosts.values()):
            return msgspec.structs.replace(settings, keys="")
        raise BadKeys(
            f"host {settings.on} has no keys, and may not listen on {host.bind} without them",
            why=f"links between hosts are encrypted with keys, and there are none in {path}",
            do=f"make them with `{_words_new(settings, settings.on)}`, or set insecure = true (--insecure) "
            "if the network is trusted",
        )
    _check(settings, path, own)
    return msgspec.structs.replace(settings, keys=str(path))


def _check(settings: Settings, path: Path, own: HostKey) -> None:
    host, registry = settings.on, settings.registry_host
    if own.host != host:
        raise BadKeys(
            f"host {host} cannot use the keys in {path}",
            why=f"they belong to host {own.host}",
            do=f"give host {host} a directory of its own: --keys DIR, or KVMESH_KEYS",
        )
    allowed = read_allowed(path)
    if allowed is None:
        raise no_list(settings, path, own)
    granted = allowed.registry()
    if granted.host != registry:
        raise BadKeys(
            f"host {host} cannot use the keys in {path}",
            why=f"they belong to a mesh with the registry on host {granted.host}, but here it is on {registry}",
            do="correct which host has `registry = true`, or give another --keys DIR",
        )
    if host == registry and granted.public_key != own.public_key:
        raise BadKeys(
            f"host {host} cannot use the keys in {path}",
            why="host.json and allowed.json have different public keys for it",
            do=f"put the right file back, or make new keys with `{_words_new(settings, host, '--force')}`",
        )


def no_keys(settings: Settings, path: Path) -> BadKeys:
    """The error of a command that needs this host's keys, for a directory that has none."""
    new = words(settings, "new", "--host", "NAME", here=True)
    return BadKeys(
        "this host has no keys",
        why=f"there are none in {path}",
        do=f"make them with `{new}`, or say where they are: --keys DIR",
    )


def no_list(settings: Settings, path: Path, own: HostKey) -> BadKeys:
    """The error of a host that has its own keys and no list of others."""
    registry = settings.registry_host or "HEAD"
    if own.host == settings.registry_host:
        do = f"put it back, or start over with `{_words_new(settings, own.host, '--force')}`"
    else:
        add = words_to_add(settings, registry, "ITS_PUBLIC_KEY", "--roles", REGISTRY, here=True)
        do = f"say which key to trust: `{add}`, with the key that `meshctl keys ls` shows on host {registry}"
    return BadKeys(f"host {own.host} does not know the keys of other hosts", why=f"{path} has no allowed.json", do=do)


def _words_new(settings: Settings, host: str, *arguments: str) -> str:
    # The printed command names no topology file, from which this one knows where the registry is.
    registry = ("--registry",) if host == settings.registry_host else ()
    return words(settings, "new", "--host", host, *registry, *arguments, here=True)


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


def read_own(path: Path) -> HostKey | None:
    """This host's pair; None if there is none. Raises BadKeys."""
    with key_files(path) as files:
        return files.read_key()


def read_allowed(path: Path) -> AllowList | None:
    """The list beside it; None if there is none. Raises BadKeys."""
    with key_files(path) as files:
        return files.read_allowed()


def write_allowed(path: Path, allowed: AllowList) -> None:
    """Replace the list. Raises BadKeys."""
    with key_files(path) as files:
        files.write_allowed(allowed)


@contextlib.contextmanager
def key_files(path: Path) -> Generator[KeyDirectory]:
    """A directory of keys. Errors with its files are raised as BadKeys, in the form that all commands print."""
    try:
        yield KeyDirectory(path)
    except MeshError as error:
        do = "see `meshctl keys --help`"
        if isinstance(error, DamagedKeyFile):
            do = "put back what was there, or remove that file: then `meshctl up` says how to make it anew"
        raise BadKeys(f"the keys in {path} cannot be used", why=error.message, do=do) from error


def words(settings: Settings, *arguments: str, here: bool = False) -> str:
    """A `meshctl keys` command for the same mesh, as it is typed; `here`: on this host, in its directory of keys."""
    return shlex.join(["meshctl", "keys", *arguments, *_same_mesh(settings, here=here)])


def words_to_add(settings: Settings, host: str, public_key: str, *arguments: str, here: bool = False) -> str:
    """The same for `add`. A key is always in quotes, also one that stands for another, since most need them."""
    rest = [*arguments, *_same_mesh(settings, here=here)]
    return " ".join([shlex.join(["meshctl", "keys", "add", host]), f"'{public_key}'", *map(shlex.quote, rest)])


def _same_mesh(settings: Settings, *, here: bool) -> list[str]:
    name = ["--name", settings.name] if settings.name != "default" else []
    # Another host has a directory of its own, which is not known here.
    return name + (["--keys", str(key_directory(settings, {}))] if here and settings.keys else [])
