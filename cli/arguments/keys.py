"""`meshctl keys ...`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.arguments.options import FileOption, OutputOption, commands, example

if TYPE_CHECKING:
    from cli.commands.keys import KeyPlace

app = commands(
    "keys", "Make this host's key pair, manage which hosts may join, make API keys for clients.", "meshctl keys ls"
)

KeysOption = Annotated[
    str | None, typer.Option("--keys", metavar="DIR", help="Key directory, if not ~/.config/kvmesh/MESH.")
]
MeshOption = Annotated[str | None, typer.Option("--name", metavar="MESH", help="Which mesh.")]
HostArgument = Annotated[str, typer.Argument(metavar="HOST", help="Name of a host.")]
KeyArgument = Annotated[str, typer.Argument(metavar="PUBLIC_KEY", help="Public key that `keys new` printed there.")]

_KEY: Final = "rq5uPmYfrobbWpAcThisIsOnlyAnExample01234"


def _place(file: Path | None, name: str | None, keys: str | None) -> "KeyPlace":
    from cli.commands.keys import KeyPlace

    return KeyPlace(file, name, keys)


@app.command("new", epilog=example("meshctl keys new --host head --registry"))
def new(
    host: Annotated[str | None, typer.Option(metavar="NAME", help="Which host this is.")] = None,
    registry: Annotated[
        bool, typer.Option("--registry", help="This host has the registry; a topology file says so itself.")
    ] = False,
    all_hosts: Annotated[
        bool, typer.Option("--all-hosts", help="Make keys for every host in the topology file, each in its own folder.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing keys.")] = False,
    file: FileOption = None,
    name: MeshOption = None,
    keys: KeysOption = None,
    output: OutputOption = "table",
) -> None:
    """Make this host's key pair, and print the public half."""
    from cli.commands.keys import new as run
    from cli.commands.keys import new_of_all

    place = _place(file, name, keys)
    raise typer.Exit(
        new_of_all(place) if all_hosts else run(place, host, has_registry=registry, force=force, output=output)
    )


@app.command("add", epilog=example(f"meshctl keys add d {_KEY}"))
def add(
    host: HostArgument,
    public_key: KeyArgument,
    roles: Annotated[
        str | None, typer.Option(metavar="A,B", help="Roles its actors may have; all but registry if left out.")
    ] = None,
    file: FileOption = None,
    name: MeshOption = None,
    keys: KeysOption = None,
) -> None:
    """Let a host join, by its public key; on a host without the registry, say which host has it."""
    from cli.commands.keys import add as run

    raise typer.Exit(run(_place(file, name, keys), host, public_key, roles))


@app.command("ls", epilog=example("meshctl keys ls"))
def ls(
    file: FileOption = None, name: MeshOption = None, keys: KeysOption = None, output: OutputOption = "table"
) -> None:
    """List the hosts whose keys are accepted."""
    from cli.commands.keys import ls as run

    raise typer.Exit(run(_place(file, name, keys), output))


@app.command("revoke", epilog=example("meshctl keys revoke d"))
def revoke(host: HostArgument, file: FileOption = None, name: MeshOption = None, keys: KeysOption = None) -> None:
    """Stop accepting a host's key; if the host runs, it is cut off."""
    from cli.commands.keys import revoke as run

    raise typer.Exit(run(_place(file, name, keys), host))


@app.command("token", epilog=example("meshctl keys token"))
def token(
    file: FileOption = None, name: MeshOption = None, keys: KeysOption = None, output: OutputOption = "table"
) -> None:
    """Print the token with which another machine joins: `meshctl up --join TOKEN`."""
    from cli.commands.token import token as run

    raise typer.Exit(run(_place(file, name, keys), output))


@app.command("api", epilog=example("meshctl keys api alice --requests 8"))
def api(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is, as logs and answers will say.")],
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add its line to this file, which `up --api-key-file` takes.")
    ] = None,
    requests: Annotated[int, typer.Option(min=0, help="Most requests at work at once; 0: no limit.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Most tokens at work at once; 0: no limit.")] = 0,
    weight: Annotated[
        int, typer.Option(min=1, max=1000, help="Its part where clients wait for each other; that of others is 1.")
    ] = 1,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may change the mesh: abort, flush, release; see `up --control`.")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Make an API key for a client: prints the key, this once, and the line for the file of hashes."""
    from cli.commands.api_key import new as run

    raise typer.Exit(run(name, to, requests, tokens, output, admin=admin, weight=weight))
