"""Which model a server has."""

from typing import Final

import msgspec

from cli.bench.answer import Misdeed
from cli.bench.client import Server, get
from cli.errors import CliError, NotRunning

_LOOK_UP_S: Final = 10.0
"""A list of names; a mesh that is busy with prompts answers it late, but not by seconds."""


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


async def first_model(server: Server, otherwise: str = "or give --url; or name the --model") -> tuple[Server, str]:
    """The server with the address that answered, and the first model that it lists.

    Raises NotRunning, or CliError if it has none or asks for another key; `otherwise` is what else one can do.
    """
    what = f"{server.url} does not say which models it has"
    try:
        body, server = await get(server, "/v1/models", _LOOK_UP_S)
        return server, msgspec.json.decode(body, type=_ModelList).data[0].id
    except Misdeed as misdeed:
        why = f"{misdeed.kind}: {misdeed.detail}"
        if misdeed.kind == "status 401":
            raise CliError(what, why=why, do="give a file with a key that it knows: --api-key-file") from misdeed
        raise NotRunning(what, why=why, do=f"see `meshctl ps`, {otherwise}") from misdeed
    except (msgspec.MsgspecError, IndexError) as error:
        raise CliError(what, why=str(error), do="name one with --model") from error
