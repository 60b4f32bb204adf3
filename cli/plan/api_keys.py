"""The API keys that clients of this host's gateways must send: which file says them, and whether it can be used.

    --api-key-file FILE    hashes, one key a line (`nodes/api_keys/entries.py`); gateways read it again when it changes
    KVMESH_API_KEYS        keys themselves; `up` writes their hashes to a file in the run directory, which gateways read

No key itself is in a command line, a configuration or a log, and none is inherited by an actor.
"""

from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

import msgspec

from cli.errors import BadConfig, BadKeys
from cli.plan.settings import Settings
from cli.plan.sources import API_KEYS_VARIABLE
from cli.supervisor.kept.mesh_directory import MeshDirectory
from nodes.api_keys.entries import ApiKey, BadApiKeys, read_plain
from nodes.api_keys.file import read_key_file, write_key_file


def given_keys(environment: Mapping[str, str]) -> tuple[ApiKey, ...] | None:
    """What `KVMESH_API_KEYS` says; None if it is not set. Raises BadKeys."""
    if (text := environment.get(API_KEYS_VARIABLE)) is None:
        return None
    try:
        return read_plain(text)
    except BadApiKeys as error:
        do = "give keys like alice:KEY,bob:KEY, or unset it"
        raise BadKeys(f"{API_KEYS_VARIABLE} cannot be used", why=error.message, do=do) from None


def settle_api_keys(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings with `api_key_file` as the file that this host's gateways read; "" if they ask for no key.

    Raises BadConfig if keys are given twice, BadKeys if they cannot be used.
    """
    given = given_keys(environment)
    if given is not None:
        if settings.api_key_file:
            why = f"{API_KEYS_VARIABLE} has keys, and --api-key-file (api_key_file) is {settings.api_key_file}"
            raise BadConfig("API keys are given twice", why=why, do="unset one of them")
        _check_control(settings, given)
        return msgspec.structs.replace(settings, api_key_file=str(MeshDirectory(settings.name).api_keys))
    if not settings.api_key_file:
        _check_control(settings, ())
        return settings
    # Actors may run in another directory.
    path = Path(settings.api_key_file).expanduser().absolute()
    if settings.own_counts.gateways:
        try:
            keys = read_key_file(path)
        except BadApiKeys as error:
            do = "correct it; `meshctl keys api NAME` makes a key and its line"
            raise BadKeys("the file of API keys cannot be used", why=error.message, do=do) from error
        _check_control(settings, keys)
    return msgspec.structs.replace(settings, api_key_file=str(path))


def _check_control(settings: Settings, keys: Collection[ApiKey]) -> None:
    """Raises BadConfig for gateways that anybody could tell to change the mesh, or nobody."""
    if settings.control and settings.own_counts.gateways and not any(key.admin for key in keys):
        raise BadConfig(
            "--control (control) needs an admin key",
            why="any page in a browser can ask a gateway on its own machine, so nobody without a key may change"
            f" the mesh; there are {len(keys)} API keys, none of them an admin's",
            do="make one with `meshctl keys api NAME --admin --to FILE`, and give --api-key-file FILE; or put"
            f" admin=NAME:KEY into {API_KEYS_VARIABLE}",
        )


def take_given_keys(file: Path, environment: MutableMapping[str, str]) -> None:
    """Write the hashes of `KVMESH_API_KEYS`, if it is set, to `file`, and take it out of the environment: actors
    inherit what is left. Raises BadKeys, OSError.
    """
    if (keys := given_keys(environment)) is not None:
        write_key_file(file, keys)
        del environment[API_KEYS_VARIABLE]
