"""Pictures of the page and texts of `top`, `trace` and `bench`, of a mesh under load in which a worker is killed.

    python -m tools.captures [FOLDER]     writes docs/captures/ if no folder is given; takes a minute and a half

Starts a mesh of its own (in a run directory of its own, on a free port), and leaves nothing of it behind.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mesh.testing.ports import free_port
from tools.browser import CHROMIUM, DRIVER, Browser

FOLDER: Final = Path(__file__).parents[1] / "docs/captures"
MESH: Final = "captures"
MODEL: Final = "tiny"
VICTIM: Final = "worker-decode-1"
LOAD: Final = ("--concurrency", "6", "--prompt", "192", "--output-tokens", "160")
BEFORE_S: Final = 45.0
"""Of load: each actor keeps a sample every five seconds, and a graph of fewer than nine says little."""
AFTER_S: Final = 25.0
QUESTIONS: Final = ("What is 37 + 45?", "What is the capital of France?")
PICTURES: Final = {
    "page-light": (1600, 1120, False, 0.625),
    "page-dark": (1600, 1120, True, 0.625),
    "page-narrow": (360, 1120, False, 1.0),
}
"""Width and height in CSS pixels, dark or not, and the scale: what GitHub shows is at most 1,000 pixels wide, and all
three together are to stay below 300 KB."""


class Mesh:
    """One under `meshctl up -d`, in the run directory of `environment`."""

    def __init__(self, environment: dict[str, str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._environment = environment
        self._port = port

    def meshctl(self, *arguments: str) -> str:
        """What a command prints. Raises CalledProcessError, with what it said on stderr, which is shown."""
        return subprocess.run(
            self._command(*arguments), env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """With two decode groups: the page shows where the work of a dead one goes."""
        self.meshctl("up", "-d", "--model", MODEL, "--port", str(self._port), "--decode", "2", "--kv-memory", "64MiB")
        try:
            yield
        finally:
            self.meshctl("down", "--force")

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Clients ask one thing after the other meanwhile."""
        command = self._command("bench", *LOAD, "--requests", "1000000")
        load = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield
            assert load.poll() is None, f"the load ended by itself: {' '.join(command)}"
        finally:
            load.kill()
            load.wait()

    def kill(self, actor_id: str) -> None:
        entries = json.loads(self.meshctl("ps", "-o", "json"))
        os.kill(next(entry["pid"] for entry in entries if entry["actor_id"] == actor_id), signal.SIGKILL)

    def survivor(self) -> str:
        """The id of the call that the death held up most."""
        calls = json.loads(self.meshctl("trace", "--last", "100", "-o", "json"))
        return max((call for call in calls if call["deaths"]), key=lambda call: call["stall_s"])["request_id"]

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli", *arguments, "--name", MESH]


def capture(mesh: Mesh, folder: Path) -> None:
    """Everything, of a mesh that has just been started."""
    with Browser() as page, mesh.loaded():
        page.look(1600)
        page.open(mesh.url)
        page.until(lambda: page.text("#state").startswith("ready"))
        # What is drawn of the past are samples, which come with time alone.
        time.sleep(BEFORE_S)
        mesh.kill(VICTIM)
        page.until(lambda: VICTIM in page.text("#deaths"))
        for question in QUESTIONS:
            page.type("#text", f"{question}\n")
            page.until(lambda: page.run("return document.querySelector('#stop').disabled"))
        time.sleep(AFTER_S)
        texts = {"top": mesh.meshctl("top"), "trace-last": mesh.meshctl("trace", "--last", "8")}
        texts["trace"] = mesh.meshctl("trace", mesh.survivor())
        page.run("document.activeElement.blur()")
        for name, (width, height, dark, scale) in PICTURES.items():
            page.look(width, height, dark=dark)
            page.run("window.scrollTo(0, 0)")
            # It lays out anew, and the next state comes within a second.
            time.sleep(1.5)
            page.screenshot(folder / f"{name}.png", width, height, scale)
        assert page.complaints() == []
    texts["bench"] = mesh.meshctl("bench", *LOAD, "--requests", "96", "--seed", "1")
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    missing = [name for name, path in (("chromium", CHROMIUM), ("chromium-driver", DRIVER)) if path is None]
    if missing:
        sys.exit(f"needs {' and '.join(missing)}: on Debian, apt-get install {' '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    # Under /tmp and short: paths of sockets are at most a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="km") as base:
        mesh = Mesh({**os.environ, "XDG_RUNTIME_DIR": base, "XDG_CONFIG_HOME": base}, free_port())
        with mesh.running():
            capture(mesh, folder)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>8,}  {path}")


if __name__ == "__main__":
    main()
