"""`meshctl probe`: one question about this host's part of a mesh, for health checks of containers.

    live       the supervisor answers
    ready      every role that it keeps is ready
    generate   the same, and one token comes through the gateway, where the supervisor keeps one

One line, and an exit code; both within the time that is given.
"""

import asyncio
import contextlib
import sys
import time
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from cli.client import find_mesh
from cli.errors import CliError
from cli.exit_codes import ExitCode
from cli.protocol import ActorList, ListActors
from mesh.membership.view import READY, RELEASED, SUPERVISOR
from mesh.supervision.events import DRAINED
from nodes.roles import GATEWAY

Question = Literal["live", "ready", "generate"]

_MAX_ANSWER_BYTES: Final = 1 << 16
_SHOWN: Final = 3


class _Readiness(msgspec.Struct):
    """What a health route of the gateway answers."""

    reasons: list[str] = []


def probe(name: str, question: Question, *, timeout_s: float) -> ExitCode:
    """Print one line: to stdout if all is well, to stderr if not. Never raises CliError.

    Returns OK; NOT_RUNNING without a supervisor that answers, NOT_READY, or TIMED_OUT without a token in `timeout_s`.
    """
    began = time.monotonic()
    try:
        actors = find_mesh(name).ask(ListActors(), ActorList, timeout_s)
    except CliError as error:
        return _say(f"not live: {error.what}: {error.why}", error.exit_code)
    if question != "live":
        # Who was drained is away by an operator's wish: a container that is restarted for that would undo the wish.
        missing = [one for one in actors.actors if one.supervised and one.state not in (READY, DRAINED, RELEASED)]
        if missing:
            some = "; ".join(f"{one.actor_id} is {one.state}" for one in missing[:_SHOWN])
            more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            return _say(f"not ready: {some}{more}", ExitCode.NOT_READY)
    if question == "generate" and any(one.supervised and one.role == GATEWAY for one in actors.actors):
        left_s = max(0.0, timeout_s - (time.monotonic() - began))
        try:
            status, body = asyncio.run(_get(f"{actors.url}/health/generate", left_s))
        except TimeoutError:
            return _say(f"not ready: no token came within {timeout_s:g} s", ExitCode.TIMED_OUT)
        except (OSError, ValueError) as error:
            return _say(f"not ready: the gateway at {actors.url} does not answer: {error}", ExitCode.NOT_READY)
        if status != 200:
            return _say(f"not ready: {_reasons(body) or f'the gateway answers {status}'}", ExitCode.NOT_READY)
    num_roles = sum(one.supervised and one.role != SUPERVISOR for one in actors.actors)
    told = {"live": "the supervisor answers", "ready": f"{num_roles} actors", "generate": "a token was generated"}
    if question == "generate" and all(one.role != GATEWAY for one in actors.actors if one.supervised):
        told["generate"] = f"{num_roles} actors, and no gateway on this host"
    sys.stdout.write(f"{question}: {told[question]}, in {time.monotonic() - began:.2f} s\n")
    return ExitCode.OK


def _say(line: str, code: ExitCode) -> ExitCode:
    sys.stderr.write(" ".join(line.split()) + "\n")
    return code


def _reasons(body: bytes) -> str:
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        return "; ".join(msgspec.json.decode(body, type=_Readiness).reasons)
    return ""


async def _get(url: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of one page. Raises OSError, ValueError where that is no HTTP, and TimeoutError."""
    place = urlsplit(url)
    # A timeout of `http.client` counts from each packet on; a health check that a slow server holds up is none.
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            # HTTP/1.0, so that the body ends with the connection and is in no chunks.
            writer.write(f"GET {place.path} HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
            answer = await reader.read(_MAX_ANSWER_BYTES)
            while piece := await reader.read(_MAX_ANSWER_BYTES):
                answer = (answer + piece)[:_MAX_ANSWER_BYTES]
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("it does not speak HTTP")
    return int(words[1]), body
