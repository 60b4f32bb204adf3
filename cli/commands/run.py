"""`meshctl run ROLE`: one actor in this process, which no supervisor has started."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cli.errors import BadConfig, WrongUsage
from cli.plan.role_configs import CONFIG_TYPES
from cli.protocol import ActorProof, ProveActor
from cli.supervisor.forks.role import RoleRun, run_role
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.processes.by_pid import is_alive


def run(arguments: list[str]) -> int:
    """Parse what follows `run` and be that actor. Raises BadConfig."""
    parsed = _parser().parse_args(arguments)
    directory = MeshDirectory(parsed.name)
    directory.create()
    try:
        return _run(parsed, directory)
    finally:
        directory.remove_unused()


def _run(parsed: argparse.Namespace, directory: MeshDirectory) -> int:
    actor_id = parsed.actor_id or parsed.role.replace("_", "-")
    epoch = parsed.epoch
    if epoch is None:
        epoch = directory.last_epoch(actor_id) + 1
        directory.issue(actor_id, epoch, lambda damage: sys.stderr.write(f"{damage}\n"))
    config = _read_config(parsed.config)
    _check_model(config)
    return run_role(
        RoleRun(
            mesh=parsed.name,
            role=parsed.role,
            actor_id=actor_id,
            epoch=epoch,
            config=config,
            drain_timeout_s=parsed.drain_timeout,
            start_timeout_s=parsed.start_timeout,
            proof=_ask_proof(directory, actor_id, epoch, parsed.role),
        )
    )


def _check_model(config: dict[str, Any]) -> None:
    """Raise BadModel or BadConfig for a model that no actor could serve; a supervisor has done that for its own."""
    model, template = config.get("model"), config.get("chat_template") or ""
    if isinstance(model, str) and isinstance(template, str):
        # Imported here: actors of a supervisor need no settings.
        from cli.plan.model import plan_model
        from cli.plan.settings import Settings
        from cli.supervisor.told.progress import Progress

        plan_model(Settings(model=model, chat_template=template), Progress(2), fetches=False)


def _ask_proof(directory: MeshDirectory, actor_id: str, epoch: int, role: str) -> bytes:
    """The proof of this actor from the mesh's supervisor, empty if none lives. Raises CliError if it refuses."""
    manifest = directory.read_manifest()
    if manifest is None or not is_alive(manifest.pid, manifest.start_time):
        return b""
    # Imported here: only an actor that is started beside a supervisor has to be a client first.
    from cli.client import RunningMesh

    question = ProveActor(actor_id=actor_id, epoch=epoch, role=role)
    return RunningMesh(directory, manifest).ask(question, ActorProof).proof


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise WrongUsage(
            message,
            why=f"usage: {usage}",
            do="`meshctl run --help` lists the options, with an example",
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="meshctl run",
        description="Run one actor alone. `meshctl up --dry-run` prints the command lines of a whole mesh.",
        epilog="""Example: meshctl run detokenizer --actor-id detokenizer-7 --config '{"model": "tiny"}'""",
        # Left as it is: an example that is broken over lines cannot be copied.
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("role", choices=sorted(CONFIG_TYPES))
    parser.add_argument(
        "--name", default=os.environ.get("KVMESH_NAME") or "default", metavar="MESH", help="the mesh to join"
    )
    parser.add_argument("--actor-id", metavar="ID", help="by default the role's name")
    parser.add_argument("--epoch", type=int, help="by default the next epoch of this actor id")
    parser.add_argument("--config", default="{}", metavar="JSON", help="configuration: JSON, or a file with it")
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds to finish work after SIGTERM")
    parser.add_argument(
        "--start-timeout", type=float, default=120.0, help="seconds to become ready, without new progress"
    )
    return parser


def _read_config(text: str) -> dict[str, Any]:
    source = "--config"
    content = text.encode()
    if not text.lstrip().startswith("{"):
        source = text
        try:
            content = Path(text).read_bytes()
        except OSError as error:
            raise BadConfig(
                f"the configuration {text} cannot be read", why=os.strerror(error.errno or 0), do="give a file or JSON"
            ) from error
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadConfig(f"{source} is not a JSON object", why=str(error), do="correct it") from error
