"""The API keys that clients of this host's gateways must send: which file says them, and whether it can be used.

    --api-key-file FILE    hashes, one key a line (`nodes/api_keys/entries.py`); gateways read it again when it changes
    KVMESH_API_KEYS        keys themselves; `up` writes their hashes to a file in the run directory, which gateways read

No key itself is in a command line, a configuration or a log, and none is inherited by an actor.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

import msgspec

from cli.errors import BadConfig, BadKeys
from cli.plan.settings import API_KEYS_VARIABLE, Settings
from cli.supervisor.mesh_directory import MeshDirectory
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
    if given_keys(environment) is not None:
        if settings.api_key_file:
            why = f"{API_KEYS_VARIABLE} has keys, and --api-key-file (api_key_file) is {settings.api_key_file}"
            raise BadConfig("API keys are given twice", why=why, do="unset one of them")
        return msgspec.structs.replace(settings, api_key_file=str(MeshDirectory(settings.name).api_keys))
    if not settings.api_key_file:
        return settings
    # Actors may run in another directory.
    path = Path(settings.api_key_file).expanduser().absolute()
    if settings.own_counts.gateways:
        try:
            read_key_file(path)
        except BadApiKeys as error:
            do = "correct it; `meshctl keys api NAME` makes a key and its line"
            raise BadKeys("the file of API keys cannot be used", why=error.message, do=do) from error
    return msgspec.structs.replace(settings, api_key_file=str(path))


def take_given_keys(file: Path, environment: MutableMapping[str, str]) -> None:
    """Write the hashes of `KVMESH_API_KEYS`, if it is set, to `file`, and take it out of the environment: actors
    inherit what is left. Raises BadKeys, OSError.
    """
    if (keys := given_keys(environment)) is not None:
        write_key_file(file, keys)
        del environment[API_KEYS_VARIABLE]
