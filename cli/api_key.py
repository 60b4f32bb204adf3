"""The API key with which `meshctl` itself asks a gateway: `KVMESH_API_KEY`."""

from collections.abc import Mapping

from cli.errors import WrongUsage
from cli.plan.settings import API_KEY_VARIABLE


def own_key(environment: Mapping[str, str]) -> str:
    """The key, empty if there is none. Raises WrongUsage if no header could carry it."""
    key = environment.get(API_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        why, do = "a key has no spaces, and only characters of ASCII that can be printed", "correct it, or unset it"
        raise WrongUsage(f"{API_KEY_VARIABLE} is not an API key", why=why, do=do)
    return key
