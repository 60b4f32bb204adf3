"""Debian's chromium, driven over WebDriver's plain HTTP, which is all that tests and pictures of the page need."""

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Browser:
    """One headless browser with a profile of its own, gone with it."""

    def __enter__(self) -> Self:
        assert DRIVER, "needs chromedriver"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Its last processes may still write there when it is removed.
        self._profile = tempfile.TemporaryDirectory(prefix="kvmesh-browser-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        try:
            self.until(self._is_up, 30)
            options = {
                "args": [*ARGUMENTS, f"--user-data-dir={self._profile.name}"],
                "binary": CHROMIUM,
            }
            wanted = {
                "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"},
            }  # fmt: skip
            self._session = ""
            made = self._post("/session", capabilities={"alwaysMatch": wanted})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._session:
                self._http.delete(self._session)
        except httpx.HTTPError:
            pass
        self._http.close()
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._post(self._session + "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The body of a function of the page."""
        return self._post(self._session + "/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return self.run("return (document.querySelector(arguments[0]) || {}).textContent || ''", selector)

    def type(self, selector: str, text: str) -> None:
        """As keys of a keyboard, the last of which may be Enter (a line end)."""
        found = self._post(self._session + "/element", using="css selector", value=selector)
        element = next(iter(found.values()))
        self._post(f"{self._session}/element/{element}/value", text=text.replace("\n", "\ue007"))

    def click(self, selector: str) -> None:
        found = self._post(self._session + "/element", using="css selector", value=selector)
        self._post(f"{self._session}/element/{next(iter(found.values()))}/click")

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show pages in a window of this size, in CSS pixels, on a light or a dark system."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, width: int, height: int, scale: float = 1.0) -> None:
        """So much of the page, from its upper left corner on."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        taken = self._devtools("Page.captureScreenshot", clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """Errors in the page's console since the last time, but those of its network: servers die in tests."""
        entries = self._post(self._session + "/se/log", type="browser")
        return [one["message"] for one in entries if one["level"] == "SEVERE" and one["source"] != "network"]

    def until(self, is_so: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := is_so()):
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.05)
        return found

    def _is_up(self) -> bool:
        try:
            return self._http.get("/status").json()["value"]["ready"]
        except httpx.HTTPError:
            return False

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._post(self._session + "/goog/cdp/execute", cmd=command, params=parameters)

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value
