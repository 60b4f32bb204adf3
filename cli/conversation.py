"""What is typed into `meshctl chat`: messages, and commands that begin with a slash."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

_MAX_HISTORY: Final = 1000
"""Lines of readline's file, which is read at each start; bash keeps 500."""

HELP: Final = """\
  /help         show this help
  /clear        start over; the system message stays
  /system TEXT  set the system message; without TEXT, remove it
  /exit         quit, like Ctrl-D
  //...         a message that begins with a slash
Arrow keys recall earlier input, also from earlier conversations; Ctrl-R searches it. Ctrl-C stops an answer.
"""


class Conversation:
    """Messages so far, and what commands do to them. Pure."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.is_over = False
        self._set_system(system or "")

    def say_typed(self, line: str) -> None:
        self.say(line[1:] if line.startswith("//") else line)

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def heard(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def unsay(self) -> None:
        self.messages.pop()

    def command(self, line: str) -> str | None:
        """Run a line that is a command, and return its output; None for a message."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/") or word.startswith("//"):
            return None
        match word:
            case "/help":
                return HELP
            case "/clear":
                del self.messages[self._num_system :]
                return "started over\n"
            case "/system":
                self._set_system(rest.strip())
                return "system message set\n" if rest.strip() else "no system message\n"
            case "/exit" | "/quit":
                self.is_over = True
                return ""
            case _:
                return f"there is no command {word}; /help lists the commands\n"

    @property
    def _num_system(self) -> int:
        return sum(message["role"] == "system" for message in self.messages)

    def _set_system(self, text: str) -> None:
        told = [{"role": "system", "content": text}] if text else []
        self.messages[: self._num_system] = told


@contextlib.contextmanager
def line_editing() -> Generator[None]:
    """Arrow keys, Ctrl-R and a history that is kept for the next conversation, if readline is available."""
    try:
        # Importing it is enough: `input` then uses it.
        import readline
    except ImportError:
        yield
        return
    file = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        # Without a writable home there is no history.
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Conversations are private.
            file.touch(mode=0o600)
            readline.write_history_file(file)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvmesh" / "chat_history"
