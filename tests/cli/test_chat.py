"""`meshctl chat`: what is typed, over a server that answers as given."""

import http.client
import io
import json
import os
import pty
import readline
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.commands.chat import ChatOptions, chat
from cli.conversation import HELP, Conversation, history_file, line_editing
from cli.errors import CliError, NotRunning
from cli.exit_codes import ExitCode
from tests.cli.refused import refused


def roles(conversation):
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_commands_and_messages():
    conversation = Conversation("be brief")
    assert conversation.command("hello /help") is None
    assert conversation.command("//etc/passwd is what?") is None
    conversation.say_typed("//etc/passwd is what?")
    conversation.heard("a file")
    assert roles(conversation) == [("system", "be brief"), ("user", "/etc/passwd is what?"), ("assistant", "a file")]
    conversation.say("//as it is")
    conversation.unsay()
    assert conversation.command("/help") == HELP
    assert "/help" in conversation.command("/hlep")
    assert conversation.command(" /system be long ") == "system message set\n"
    assert roles(conversation)[0] == ("system", "be long")
    assert conversation.command("/clear") == "started over\n"
    assert roles(conversation) == [("system", "be long")]
    assert conversation.command("/system") == "no system message\n"
    assert roles(conversation) == []
    assert not conversation.is_over
    assert conversation.command("/exit") == ""
    assert conversation.is_over


def test_what_was_typed_is_kept_for_the_next_time_and_for_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    readline.clear_history()
    with line_editing():
        readline.add_history("what is 1 + 1?")
    assert history_file().stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with line_editing():
        assert readline.get_history_item(1) == "what is 1 + 1?"
    readline.clear_history()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with line_editing():
        pass


@pytest.fixture
def server():
    """Repeats what the user said last; says no to `no`, not now to `wait`, nonsense to `what`, breaks off at `stop`."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(200, b'{"data": [{"id": "parrot"}]}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(body)
            said = body["messages"][-1]["content"]
            if said == "no":
                self.answer(400, b'{"error": {"message": "I will not."}}')
            elif said == "wait":
                self.answer(503, b'{"error": {"message": "Nobody is there yet."}}')
            elif said == "what":
                self.answer(200, b"data: [1\n\n")
            elif said == "stop":
                self.send_response(200)
                self.send_header("content-length", "100")
                self.end_headers()
                self.wfile.write(b"data: ")
            else:
                chunk = {"choices": [{"delta": {"content": said}}]}
                self.answer(200, b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        httpd.url = f"http://127.0.0.1:{httpd.server_port}"
        httpd.seen = seen
        yield httpd
        httpd.shutdown()
        thread.join()


def test_a_refusal_is_told_and_the_conversation_goes_on_without_it(server, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = iter(["hello", "no", "what", "/help", "/nothing", "", "bye", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert chat("m", None, server.url, None, ChatOptions(system="sing")) is ExitCode.OK
    said = capsys.readouterr()
    assert said.out == "hello\nbye\n"
    assert "why: I will not." in said.err
    assert "cannot be understood" in said.err
    assert HELP in said.err
    assert "there is no command /nothing; /help lists the commands" in said.err
    assert [message["content"] for message in server.seen[-1]["messages"]] == ["sing", "hello", "hello", "bye"]
    assert next(lines) == "never read"


@pytest.mark.parametrize(("piped", "asked"), [("hello\n", "hello"), ("hello", "hello"), ("hello\n\n", "hello\n")])
def test_a_piped_question_ends_without_the_line_s_end(server, monkeypatch, piped, asked):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    assert chat("m", None, server.url, None, ChatOptions()) is ExitCode.OK
    assert [message["content"] for message in server.seen[-1]["messages"]] == [asked]


def test_every_failure_of_a_server_says_what_why_and_what_to_do(server, monkeypatch):
    for prompt, words, do in (
        ("no", "I will not", "correct the request"),
        ("wait", "Nobody is there", "try again when it is there"),
        ("what", "cannot be understood", "give the address"),
        ("stop", "broke off", "try again"),
    ):
        with refused(CliError, words, do=do):
            chat("m", prompt, server.url, None, ChatOptions())
    monkeypatch.setattr(http.client.HTTPResponse, "read", lambda *_: b"[]")
    with pytest.raises(CliError, match="cannot be understood"):
        chat("m", "x", server.url, None, ChatOptions())
    with pytest.raises(NotRunning, match="cannot be reached"):
        chat("m", "x", "http://127.0.0.1:1", "model", ChatOptions())


def test_a_line_is_edited_with_the_keys_of_a_terminal(server, tmp_path):
    """Typed over a terminal: a word is corrected by an arrow key, and the next line is fetched from the history."""
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "chat", "--url", server.url],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    seen = b""

    def until(words):
        """Read up to `words`. Keys wait for the prompt: before it the terminal itself takes an end of input."""
        nonlocal seen
        while words not in seen:
            seen += os.read(main, 4096)
        seen = seen.split(words, 1)[1]

    try:
        until(b"> ")
        os.write(main, b"prrot\x1b[D\x1b[D\x1b[D\x1b[Da\n")
        until(b"\nparrot\r\n")
        until(b"> ")
        os.write(main, b"\x1b[A\n")
        until(b"\nparrot\r\n")
        until(b"> ")
        os.write(main, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert [body["messages"][-1]["content"] for body in server.seen] == ["parrot", "parrot"]
