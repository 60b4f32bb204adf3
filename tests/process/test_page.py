"""The page at `/` in Debian's chromium, on a mesh of processes whose actors are killed. Skipped where there is none."""

import json
import os
import re
import signal
import urllib.error
import urllib.request

import pytest

from tools.browser import CHROMIUM, DRIVER, Browser

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

SHIFTS = """
window.shifts = [];
const named = ({ node }) => node && (node.id || node.className || node.nodeName);
new PerformanceObserver((list) => window.shifts.push(...list.getEntries().filter((one) => !one.hadRecentInput)
  .map((one) => [one.value, ...one.sources.map(named)]))).observe({ type: "layout-shift", buffered: true });
"""


def is_ready(page):
    found = re.fullmatch(r"ready · by (gateway-\d)", page.text("#state"))
    return found and found[1]


def test_a_mesh_is_followed_through_the_deaths_of_a_worker_and_of_the_gateway_that_serves_the_page(host):
    mesh = host.up("--model", "echo", "--gateways", "2")
    pids = host.pids()
    with Browser() as page:
        page.look(1280)
        page.open(host.url)
        page.run(SHIFTS)
        page.until(lambda: is_ready(page))
        assert page.text("#model").startswith("echo · ")
        page.until(lambda: all(actor in page.text("#ring-box") for actor in pids))
        page.run("window.marked = true")

        page.click("#settings summary")
        page.type("#max_tokens", "40")
        page.type("#text", "good <b>day</b>\n")
        page.until(lambda: "echogood <b>day</b>" in page.text("#talk"))
        page.until(lambda: "/v1/chat/completions" in page.text("#calls"))
        page.click("#calls button")
        page.until(lambda: "scheduler-decode-0" in page.text("#calls .story"))
        page.until(lambda: "scheduler-decode-0" in page.text(".graph .keys"))

        os.kill(pids["worker-decode-0"], signal.SIGKILL)
        page.until(lambda: "worker-decode-0" in page.text("#deaths"))
        assert "SIGKILL" in page.text("#deaths")
        page.until(lambda: page.run("return document.querySelectorAll('.graph .death').length") == 5)
        page.until(lambda: is_ready(page))
        assert "worker-decode-0" in page.text("#ring-box"), "it is shown in its place"
        page.type("#text", "again\n")
        page.until(lambda: "echoagain" in page.text("#talk"))
        page.until(lambda: page.run("return document.querySelectorAll('#calls button').length") == 2)

        # Whichever gateway it is that the page follows, the other one goes on.
        serving = is_ready(page)
        os.kill(pids[serving], signal.SIGKILL)
        page.until(lambda: serving in page.text("#deaths"))
        page.until(lambda: is_ready(page))
        assert "again" in page.text("#talk")
        assert page.run("return document.querySelectorAll('#calls button').length") == 2, "what was known stays"
        assert page.run("return window.marked"), "it was not loaded again"
        shifts = page.run("return window.shifts")
        assert sum(value for value, *_ in shifts) < 0.02, shifts

        page.open(host.url)
        page.until(lambda: is_ready(page))
        # Calls of the dead gateway went with it; of deaths the other one has heard.
        page.until(lambda: all(dead in page.text("#deaths") for dead in ("worker-decode-0", serving)), 5)
        for width in (360, 768, 1600):
            page.look(width)
            page.until(lambda: page.run("return document.documentElement.scrollWidth <= window.innerWidth"), 5)
        host.ends_well(mesh)
        page.until(lambda: page.text("#state").startswith("gone: "))
        assert page.complaints() == []


def test_with_keys_the_page_asks_for_one_and_keeps_it_out_of_addresses(host, tmp_path):
    path = tmp_path / "keys"
    made = host.meshctl("keys", "api", "alice", "--to", str(path), name=False)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    mesh = host.up("--model", "echo", "--mixed", "1", "--api-key-file", str(path))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(host.url + "/events/mesh")
    with Browser() as page:
        page.open(host.url)
        page.until(lambda: page.text("#state") == "needs a key")
        page.type("#key", "wrong\n")
        page.until(lambda: "does not know this key" in page.text("#refused"))
        page.type("#key", f"{key}\n")
        page.until(lambda: is_ready(page))
        page.type("#text", "with a key\n")
        page.until(lambda: "echowith a key" in page.text("#talk"))
        page.run("location.reload()")
        page.until(lambda: is_ready(page))
        asked = page.run("return performance.getEntries().map((one) => one.name).concat(location.href)")
        assert key not in json.dumps(asked)
        assert page.complaints() == []
    host.ends_well(mesh)
