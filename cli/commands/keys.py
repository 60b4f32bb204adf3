"""`meshctl keys`: the key pair of this host, and which hosts' keys the mesh accepts.

    on every host           new                 its pair; the secret half never leaves it
    on the registry's host  add, revoke         the list, which a running mesh tells all its hosts
    on another host         add --roles registry
                                                whom it trusts before the mesh has told it anything

Files are those of `mesh/runtime/key_files.py`; a running mesh is not asked but sees that they have changed.
"""

import difflib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.errors import BadConfig, BadKeys, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from cli.plan.faults import find_fault, unknown_name
from cli.plan.hosts import HostName
from cli.plan.keys import (
    REGISTRY_ROLES,
    key_directory,
    key_files,
    no_keys,
    no_list,
    pinned,
    read_allowed,
    read_own,
    words,
    words_to_add,
    write_allowed,
)
from cli.plan.settings import overlay_settings
from mesh.errors import MeshError
from mesh.membership.keys import ALL_ROLES, AllowedHost, AllowList, HostKey
from mesh.membership.view import SUPERVISOR
from nodes.roles import REGISTRY, ROLES

_NOBODY: Final = AllowList(0, ())


class KeyPlace:
    """The keys of this host for one mesh, as a command line names them: by topology file, name, directory.

    Raises BadConfig.
    """

    def __init__(self, file: Path | None, name: str | None, keys: str | None) -> None:
        self.settings, self.said_host, given = overlay_settings(file, os.environ, {"name": name, "keys": keys})
        is_known = file is not None or "name" in given or not self.settings.keys
        self.mesh: str | None = self.settings.name if is_known else None
        """None if only a directory was named: the files in it do not say of which mesh they are."""
        self.path = key_directory(self.settings, os.environ)

    def own(self) -> HostKey:
        """This host's pair. Raises BadKeys."""
        own = read_own(self.path)
        if own is None:
            raise no_keys(self.settings, self.path)
        return own

    def list_to_change(self) -> tuple[HostKey, AllowList]:
        """The pair and the list of the registry's host. Raises BadKeys on any other host."""
        own = self.own()
        allowed = read_allowed(self.path)
        if allowed is None:
            raise no_list(self.settings, self.path, own)
        if allowed.registry().host != own.host:
            raise BadKeys(
                "the list of hosts cannot be changed here",
                why=f"this is host {own.host}, which only has a copy of the list",
                do=f"run this on host {allowed.registry().host}",
            )
        return own, allowed

    def words(self, *arguments: str) -> str:
        """A command for the same keys, as it is typed on this host."""
        return words(self.settings, *arguments, here=True)


def new(place: KeyPlace, host: str | None, *, has_registry: bool, force: bool, output: str) -> ExitCode:
    """Make this host's pair, and on the registry's host the list of hosts with itself on it.

    The public key goes to stdout, what to do with it to stderr. Raises WrongUsage, BadConfig, BadKeys.
    """
    host = _own_name(place, host)
    settings, path = place.settings, place.path
    if settings.hosts:
        has_registry = settings.registry_host == host
    elif not has_registry and (known := read_allowed(path)) is not None:
        # To replace a key, --registry may be left out: the list says that this host has the registry.
        has_registry = known.registry().host == host
    own = make_pair(path, host, has_registry=has_registry, force=force)
    if output == "json":
        print_json({"mesh": place.mesh, "host": host, "public_key": own.public_key, "directory": str(path)})
    else:
        sys.stdout.write(f"{own.public_key}\n")
    of_mesh = f" of the mesh {place.mesh}" if place.mesh else ""
    sys.stderr.write(f"host {host}{of_mesh} has its keys in {path}\n")
    if not has_registry:
        registry = settings.registry_host or "the registry's host"
        sys.stderr.write(f"on {registry}:  {words_to_add(settings, host, own.public_key)}\n")
        if read_allowed(path) is None:
            head = settings.registry_host or "HEAD"
            add = words_to_add(settings, head, "ITS_PUBLIC_KEY", "--roles", REGISTRY, here=True)
            sys.stderr.write(f"here:  {add}\n")
    if force:
        # Actors read the key when they start: until then, others refuse them for the key that they still have.
        name = f" --name {place.mesh}" if place.mesh else ""
        sys.stderr.write(
            f"if host {host} is running, restart it: `meshctl down --host {host}{name}`, then `meshctl up` as before\n"
        )
    return ExitCode.OK


def new_of_all(place: KeyPlace) -> ExitCode:
    """Make pairs for all hosts of the topology file, each in a folder of its own, and give all of them the list.

    A host that has a pair keeps it, and is listed with it unless it was revoked. Raises WrongUsage, BadKeys.
    """
    settings = place.settings
    if not settings.hosts:
        raise WrongUsage(
            "--all-hosts needs a topology file with hosts",
            why="keys are made for each [hosts.NAME] in it",
            do="name the file with --file (or KVMESH_TOPOLOGY)",
        )
    registry = place.path / settings.registry_host
    there = msgspec.structs.replace(settings, keys=str(registry))
    # The registry's host first: the list is its own.
    names = sorted(settings.hosts, key=lambda name: name != settings.registry_host)
    made = [name for name in names if read_own(place.path / name) is None]
    for name in made:
        make_pair(place.path / name, name, has_registry=name == settings.registry_host, force=False)
    allowed = read_allowed(registry)
    if allowed is None:
        raise no_list(there, registry, _pair(registry))
    before = allowed
    revoked = [
        name for name in names if name not in made and allowed.of(name) is None and _was_listed(place.path / name)
    ]
    listed = [name for name in names if name not in revoked]
    for name in listed:
        allowed = _with_pair(allowed, place.path / name, name)
    for name in listed:
        known = before if name == settings.registry_host else read_allowed(place.path / name)
        if known is None or known.version < allowed.version:
            write_allowed(place.path / name, allowed)
    told = f"made keys for {', '.join(made)}" if made else "all hosts have keys"
    sys.stderr.write(f"{told}: a folder for each in {place.path}\n")
    for name in listed:
        if name not in made and before.of(name) != allowed.of(name):
            sys.stderr.write(f"host {name} had keys already, and is on the list with them now\n")
    for name in revoked:
        add = words_to_add(there, name, _pair(place.path / name).public_key, here=True)
        sys.stderr.write(f"host {name} is not on the list, as after `keys revoke`: `{add}` lets it join again\n")
    return ExitCode.OK


def _was_listed(path: Path) -> bool:
    """Whether a host was on the list before: a list of the mesh, which begins at version 1, was given to it."""
    known = read_allowed(path)
    return known is not None and known.version > 0


def _with_pair(allowed: AllowList, path: Path, host: str) -> AllowList:
    """The list with the key that a host has now, and the roles that it was granted. Raises BadKeys."""
    own, there = _pair(path), allowed.of(host)
    if own.host != host:
        raise BadKeys(
            f"host {host} cannot use the keys in {path}",
            why=f"they belong to host {own.host}",
            do="move them to a folder of that name, and run this again",
        )
    if there is not None and there.public_key == own.public_key:
        return allowed
    try:
        return allowed.with_host(host, own.public_key, there.roles if there is not None else None)
    except MeshError as error:
        raise BadKeys(f"host {host} cannot be added", why=error.message, do="correct it") from error


def make_pair(path: Path, host: str, *, has_registry: bool, force: bool) -> HostKey:
    """Make a new pair for a host; on the registry's host also a list with itself, or its new key in the list there is.

    Raises BadKeys, for instance if there is a pair already.
    """
    known = None if force else read_own(path)
    if known is not None:
        raise BadKeys(
            f"host {known.host} already has keys",
            why=f"they are in {path}, and other hosts may already rely on the public key",
            do="keep them, or replace them with --force and add the new public key wherever the old one was added",
        )
    own = HostKey.new(host)
    with key_files(path) as files:
        allowed = (files.read_allowed() or _NOBODY) if has_registry else None
        files.write_key(own)
        if allowed is not None:
            files.write_allowed(allowed.without(host).with_host(host, own.public_key, REGISTRY_ROLES))
    return own


def add(place: KeyPlace, host: str, public_key: str, roles: str | None) -> ExitCode:
    """Let a host join the mesh by its public key. Raises BadConfig, BadKeys."""
    _check_name(host)
    granted = tuple(role.strip() for role in roles.split(",") if role.strip()) if roles is not None else None
    own, known = place.own(), read_allowed(place.path)
    # Again if the registry's host has a new key since: it could have told this host only over its old key.
    tells_registry = known is None or (
        own.host != known.registry().host and (known.version == 0 or host == known.registry().host)
    )
    try:
        if tells_registry and granted == (REGISTRY,):
            if known is None or known.registry().public_key != public_key or host != known.registry().host:
                write_allowed(place.path, pinned(own, host, public_key))
            sys.stderr.write(f"host {own.host} accepts {host} as the registry's host\n")
            return ExitCode.OK
        own, allowed = place.list_to_change()
        if granted is not None and REGISTRY in granted:
            raise BadKeys(
                f"host {host} cannot be given the registry",
                why=f"it is on host {own.host}, and a mesh has only one",
                do="leave that role out",
            )
        there = allowed.of(host)
        if there is not None and there.public_key != public_key:
            raise BadKeys(
                f"host {host} cannot be added",
                why=f"there already is a host of that name, with the key {there.public_key}",
                do=f"remove that with `{place.words('revoke', host)}`, or give this host another name",
            )
        if there is None or there.roles != granted:
            write_allowed(place.path, allowed.with_host(host, public_key, granted))
    except MeshError as error:
        raise BadKeys(f"host {host} cannot be added", why=error.message, do="correct it") from error
    before = f" (before: {_roles(there.roles)})" if there is not None and there.roles != granted else ""
    mesh = f" the mesh {place.mesh}" if place.mesh else ""
    sys.stderr.write(f"host {host} may join{mesh} as {_roles(granted)}{before}\n")
    for note in _notes_on(granted):
        sys.stderr.write(f"note: {note}\n")
    return ExitCode.OK


def _notes_on(roles: tuple[str, ...] | None) -> list[str]:
    """Notes on what may be a slip but can be intended: a user's own actors have roles of their own."""
    if roles is None or ALL_ROLES in roles:
        return []
    notes: list[str] = []
    for role in sorted({*roles} - ROLES):
        near = difflib.get_close_matches(role, ROLES, 1)
        meant = f"; did you mean {near[0]}?" if near else f": those are {', '.join(sorted(ROLES))}"
        notes.append(f"{role} is not one of the built-in roles{meant}")
    if SUPERVISOR not in roles:
        notes.append("without the role supervisor nothing that `meshctl up` starts there can join")
    return notes


def revoke(place: KeyPlace, host: str) -> ExitCode:
    """Have the mesh stop accepting a host's key; a running host is cut off within seconds. Raises BadKeys."""
    own, allowed = place.list_to_change()
    if host == own.host:
        raise BadKeys(
            "the registry's host cannot be revoked",
            why="the list is kept there",
            do=f"`{place.words('new', '--host', host, '--force')}` gives it another key",
        )
    if allowed.of(host) is None:
        fault = unknown_name(host, [one.host for one in allowed.hosts if one.host != own.host], "host")
        raise BadKeys(f"host {host} cannot be revoked", why="it is not on the list", do=fault.do)
    write_allowed(place.path, allowed.without(host))
    sys.stderr.write(f"the key of host {host} is revoked; a running mesh cuts it off within seconds\n")
    return ExitCode.OK


def ls(place: KeyPlace, output: str) -> ExitCode:
    """Print the list of hosts as this one has it. Raises BadKeys."""
    own, allowed = place.own(), read_allowed(place.path)
    hosts = allowed.hosts if allowed is not None else (AllowedHost(own.host, own.public_key, None),)
    if output == "json":
        print_json(_entry(place, own, allowed, hosts))
        return ExitCode.OK
    there = _where(own, allowed)
    sys.stdout.write(f"{place.mesh}: {there}, in {place.path}\n" if place.mesh else f"{place.path}: {there}\n")
    rows = [[one.host, one.public_key, _roles(one.roles), "this" if one.host == own.host else ""] for one in hosts]
    print_table(("HOST", "PUBLIC KEY", "ROLES", ""), rows)
    return ExitCode.OK


def _entry(
    place: KeyPlace, own: HostKey, allowed: AllowList | None, hosts: tuple[AllowedHost, ...]
) -> Mapping[str, Any]:
    return {
        "mesh": place.mesh,
        "directory": str(place.path),
        "host": own.host,
        "registry_host": allowed.registry().host if allowed is not None else None,
        "version": allowed.version if allowed is not None else None,
        "hosts": [{"host": one.host, "public_key": one.public_key, "roles": one.roles} for one in hosts],
    }


def _where(own: HostKey, allowed: AllowList | None) -> str:
    if allowed is None:
        return "no list yet, only this host's own key"
    if allowed.registry().host == own.host:
        return f"version {allowed.version}"
    if allowed.version == 0:
        return "no list from the mesh yet, only what was added here"
    return f"version {allowed.version}, a copy of host {allowed.registry().host}'s"


def _roles(roles: tuple[str, ...] | None) -> str:
    return "any but registry" if roles is None else "any" if roles == REGISTRY_ROLES else ", ".join(roles)


def _own_name(place: KeyPlace, host: str | None) -> str:
    host = host or place.said_host
    hosts = place.settings.hosts
    if not host:
        known = f": {', '.join(hosts)}" if hosts else ""
        raise WrongUsage(
            "it is not clear which host the keys are for",
            why=f"the hosts of a mesh are known by name{known}",
            do=f"name it with --host: `{shlex.join(['meshctl', 'keys', 'new', '--host', next(iter(hosts), 'NAME')])}`",
        )
    _check_name(host)
    if hosts and host not in hosts:
        fault = unknown_name(host, hosts, "host")
        raise BadConfig(f"--host {host} is not a host of the topology file", why=fault.why, do=fault.do)
    return host


def _check_name(host: str) -> None:
    fault = find_fault(host, HostName, "the name of a host", strict=True)
    if fault is not None:
        raise BadConfig(f"{host!r} cannot be the name of a host", why=fault.why, do=fault.do)


def _pair(path: Path) -> HostKey:
    own = read_own(path)
    assert own is not None, "it was made or found a moment ago"
    return own
