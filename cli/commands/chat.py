"""`meshctl chat`: one message or a conversation, streamed from the gateway's OpenAI-compatible route."""

import contextlib
import http.client
import os
import sys
from collections.abc import Generator
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from cli.api_key import own_key
from cli.client import find_mesh
from cli.conversation import Conversation, line_editing
from cli.errors import CliError, NotRunning, WrongUsage
from cli.exit_codes import ExitCode
from cli.plan.sources import API_KEY_VARIABLE

_TIMEOUT_S: Final = 600.0
"""Between two pieces of an answer: a long prompt on a slow CPU may take minutes until its first token."""
_FOR_NOW: Final = (http.client.OK, http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
"""Statuses of what may be answered later, like all faults of the server's; an error within a stream comes with 200."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What goes with every message; None is the server's default."""

    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()


def _url_of(mesh: str) -> str:
    url = find_mesh(mesh).manifest.url
    if not url:
        why, do = "it is an engine's, and has no HTTP", f"use `Engine.attach({mesh!r}).chat(…)` in Python"
        raise WrongUsage(f"the mesh {mesh!r} cannot be talked to from here", why=why, do=do)
    return url


def chat(name: str, prompt: str | None, url: str | None, model: str | None, options: ChatOptions) -> ExitCode:
    """Answer `prompt`, or else every line that is typed. Raises NotRunning, or CliError with the server's message."""
    server = _Server(url if url is not None else _url_of(name))
    chosen = model or server.first_model()
    if prompt is None and not sys.stdin.isatty():
        # As a shell's `$(…)`: `echo` ends a line, and that is no part of the question.
        prompt = sys.stdin.read().removesuffix("\n")
    conversation = Conversation(options.system)
    if prompt is not None:
        conversation.say(prompt)
        _answer(server, chosen, conversation.messages, options)
        return ExitCode.OK
    sys.stderr.write(f"{chosen} at {server.url}; Ctrl-D quits, Ctrl-C stops an answer, /help shows more\n")
    with line_editing():
        while (line := _typed()) is not None:
            told = conversation.command(line)
            if told is not None:
                sys.stderr.write(told)
            elif line.strip():
                conversation.say_typed(line)
                try:
                    conversation.heard(_answer(server, chosen, conversation.messages, options))
                except CliError as error:
                    # A message that could not be answered is taken back, so that one can go on.
                    conversation.unsay()
                    sys.stderr.write(f"{error}\n")
            if conversation.is_over:
                break
    return ExitCode.OK


def _typed() -> str | None:
    """The next line; None at the end."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        sys.stderr.write("\n")
        return None


def _answer(server: "_Server", model: str, messages: list[dict[str, str]], options: ChatOptions) -> str:
    """Print an answer as it comes. Returns what came until it ended or was interrupted."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    said: list[str] = []
    stream = server.stream(body)
    try:
        for text in stream:
            said.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        # Closing the connection is how the server learns that nobody listens.
        stream.close()
    finally:
        if said:
            sys.stdout.write("\n")
    return "".join(said)


class _Server:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urlsplit(self.url)
        key = own_key(os.environ)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            is_address = self._parts.scheme in ("http", "https") and self._parts.hostname and self._parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            why = "it must be http:// or https:// with a host, and a port unless it is the default one"
            raise WrongUsage(f"--url {url} is not a valid address", why=why, do="write it like http://127.0.0.1:8000")

    def first_model(self) -> str:
        with self._asked("GET", "/v1/models") as response:
            return msgspec.json.decode(response.read(), type=_ModelList).data[0].id

    def stream(self, body: dict[str, Any]) -> Generator[str]:
        with self._asked("POST", "/v1/chat/completions", msgspec.json.encode(body)) as response:
            for line in response:
                if not line.startswith(b"data: ") or not line.endswith(b"\n"):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data.startswith(b'{"error"'):
                    raise self._refused(response.status, data)
                for choice in msgspec.json.decode(data, type=_Chunk).choices:
                    if choice.delta.content:
                        yield choice.delta.content
            raise http.client.HTTPException("the stream ended without [DONE]")

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: bytes | None = None) -> Generator[http.client.HTTPResponse]:
        """The response, to be read. Raises CliError if it is an error, breaks off, or comes from no such server."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "127.0.0.1", self._parts.port, timeout=_TIMEOUT_S)
        try:
            self._send(connection, method, path, body)
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise self._refused(response.status, response.read())
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise CliError(
                f"the answer from {self.url} broke off",
                why=str(error) or type(error).__name__,
                do="try again; see `meshctl ps` and `meshctl logs gateway`",
            ) from error
        except (msgspec.MsgspecError, IndexError) as error:
            raise CliError(
                f"the answer from {self.url} cannot be understood",
                why=f"it is not that of an OpenAI-compatible server: {error}",
                do="give the address of one with --url",
            ) from error
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None) -> None:
        try:
            connection.request(method, self._parts.path + path, body, self._headers)
        except OSError as error:
            raise NotRunning(
                f"{self.url} cannot be reached",
                why=error.strerror or str(error),
                do="see `meshctl ps`",
            ) from error

    def _refused(self, status: int, body: bytes) -> CliError:
        try:
            message = msgspec.json.decode(body, type=_ErrorBody).error.message
        except msgspec.MsgspecError:
            message = body.decode(errors="replace")
        what, why = f"the server at {self.url} answered with status {status}", message or "it does not say why"
        if status == http.client.UNAUTHORIZED:
            return CliError(what, why=why, do=f"set {API_KEY_VARIABLE} to a key that it knows")
        return CliError(
            what,
            why=why,
            do=(
                "`meshctl ps` and `meshctl logs gateway` show what is missing; try again when it is there"
                if status >= http.client.INTERNAL_SERVER_ERROR or status in _FOR_NOW
                else "correct the request"
            ),
        )
