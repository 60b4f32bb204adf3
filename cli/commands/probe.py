"""`meshctl probe`: one question about this host's part of a mesh, for health checks of containers.

    live       the supervisor answers
    ready      every role that it keeps is ready
    generate   the same, and one token comes through the gateway, if the supervisor keeps one

One line, and an exit code; both within the time that is given.
"""

import asyncio
import os
import sys
import time
from typing import Final, Literal
from urllib.parse import urlsplit

from cli.api_key import own_key
from cli.client import find_mesh
from cli.errors import CliError
from cli.exit_codes import ExitCode
from cli.http_get import get_page
from cli.protocol import ActorList, ActorStatus, ListActors
from mesh.membership.view import READY, RELEASED, SUPERVISOR
from mesh.supervision.events import DRAINED
from nodes.roles import GATEWAY

Question = Literal["live", "ready", "generate"]

_SHOWN: Final = 3
"""A health check's output is one line of a container's log, and podman and docker keep only its first kilobytes."""


def probe(name: str, question: Question, *, timeout_s: float) -> ExitCode:
    """Print one line: to stdout if all is well, to stderr if not. Never raises CliError.

    Returns OK; NOT_RUNNING without a supervisor that answers, NOT_READY, or TIMED_OUT without a token in `timeout_s`.
    """
    began = time.monotonic()
    try:
        actors = find_mesh(name).ask(ListActors(), ActorList, timeout_s)
    except CliError as error:
        return _say(f"not live: {error.what}: {error.why}", error.exit_code)
    own = [actor for actor in actors.actors if actor.supervised]
    has_gateway = any(actor.role == GATEWAY for actor in own)
    if question != "live":
        # A drained actor is away at an operator's request, and restarting the container for it would undo that.
        missing = [actor for actor in own if actor.state not in (READY, DRAINED, RELEASED)]
        if missing:
            some = _some([f"{actor.actor_id} is {actor.state}" for actor in missing], "; ")
            return _say(f"not ready: {some}", ExitCode.NOT_READY)
    if question == "generate" and has_gateway:
        left_s = max(0.0, timeout_s - (time.monotonic() - began))
        try:
            place = urlsplit(actors.url)
            page = asyncio.run(get_page(place.hostname, place.port, "/health/generate", left_s, own_key(os.environ)))
        except CliError as error:
            return _say(f"not ready: {error.what}: {error.why}", error.exit_code)
        except TimeoutError:
            return _say(f"not ready: no token came within {timeout_s:g} s", ExitCode.TIMED_OUT)
        except (OSError, ValueError) as error:
            return _say(f"not ready: the gateway at {actors.url} does not answer: {error}", ExitCode.NOT_READY)
        if page.status != 200:
            return _say(f"not ready: {page.reasons or f'the gateway answers {page.status}'}", ExitCode.NOT_READY)
    told = {"live": "the supervisor answers", "ready": _counted(own), "generate": "a token was generated"}
    if not has_gateway:
        told["generate"] = f"{_counted(own)}, and no gateway on this host"
    sys.stdout.write(f"{question}: {told[question]}, in {time.monotonic() - began:.2f} s\n")
    return ExitCode.OK


def _counted(own: list[ActorStatus]) -> str:
    actors = [actor for actor in own if actor.role != SUPERVISOR]
    away = {state: [actor.actor_id for actor in actors if actor.state == state] for state in (DRAINED, RELEASED)}
    parts = [f"{len(actors) - sum(map(len, away.values()))} actors"]
    parts += [f"{len(ids)} {state} ({_some(ids, ', ')})" for state, ids in away.items() if ids]
    return ", ".join(parts)


def _some(texts: list[str], between: str) -> str:
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return between.join([*texts[:_SHOWN], *more])


def _say(line: str, code: ExitCode) -> ExitCode:
    sys.stderr.write(" ".join(line.split()) + "\n")
    return code
