"""The page at `/` under axe-core, in Debian's chromium: it finds nothing, light or dark, with keys and without."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from tests.process.test_page import is_ready
from tools.browser import CHROMIUM, DRIVER, Browser

PACKAGE = importlib.util.find_spec("axe_core_python")

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
    pytest.mark.skipif(PACKAGE is None, reason="needs axe-core: pip install axe-core-python"),
]

WIDTHS = (360, 1600)
RUN = """
return axe.run(document, { resultTypes: ["violations"] }).then(({ violations, passes }) => ({
  num_passed: passes.length,
  found: violations.map(({ id, impact, nodes }) => [impact, id, nodes.map(({ target }) => target.join(" "))]),
}));
"""


def assert_usable(page):
    """In both colour schemes, and in the narrowest and the widest window."""
    script = Path(PACKAGE.origin).with_name("axe.min.js").read_text()
    # The page's policy lets no script in that is not its own; the driver's are the browser's.
    page.run(script + "; window.axe = axe;")
    for dark in (False, True):
        for width in WIDTHS:
            page.look(width, dark=dark)
            told = page.run(RUN)
            assert told["num_passed"] > 10, told
            assert told["found"] == [], (dark, width)


def test_a_page_of_a_mesh_with_calls_and_a_death(host):
    host.up("--model", "echo")
    pid = host.pids()["worker-decode-0"]
    with Browser() as page:
        page.open(host.url)
        page.until(lambda: is_ready(page))
        page.type("#text", "good day\n")
        page.until(lambda: "echogood day" in page.text("#talk"))
        page.until(lambda: "/v1/chat/completions" in page.text("#calls"))
        page.click("#calls button")
        page.click("#settings summary")
        os.kill(pid, signal.SIGKILL)
        page.until(lambda: page.run("return document.querySelectorAll('.graph .death').length") == 5)
        assert_usable(page)


def test_a_page_that_asks_for_a_key_and_the_one_behind_it(host, tmp_path):
    path = tmp_path / "keys"
    key = host.meshctl("keys", "api", "alice", "--to", str(path), name=False).stdout.strip()
    host.up("--model", "echo", "--mixed", "1", "--api-key-file", str(path))
    with Browser() as page:
        page.open(host.url)
        page.until(lambda: page.text("#state") == "needs a key")
        assert_usable(page)
        page.type("#key", "wrong\n")
        page.until(lambda: "does not know this key" in page.text("#refused"))
        assert_usable(page)
        page.type("#key", f"{key}\n")
        page.until(lambda: is_ready(page))
        assert_usable(page)
