"""Each role killed while requests run: a request ends in its right text or in an error, and the mesh comes back."""

import http.client
import json
import os
import signal
import threading
import urllib.error

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

MESH = ("--model", "echo?step_ms=5", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0")
NUM_CLIENTS = 6
# No request may take longer, whatever dies: the gateway's patience with a role that is gone, and a start.
ANSWER_TIMEOUT_S = 45


class Load:
    """Clients that ask without a pause and keep what was not as it should be."""

    def __init__(self, host):
        self.host = host
        self.num_right = 0
        self.errors = []
        self.wrong = []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()

    def ask(self, number):
        turn = 0
        while not self.stopped.is_set():
            turn += 1
            text = f"client {number} asks for the {turn}th time and wants this very sentence"
            try:
                answer = self.host.say(text, timeout_s=ANSWER_TIMEOUT_S, max_tokens=200)
            except urllib.error.HTTPError as error:
                with error:
                    self.errors.append(json.loads(error.read())["error"]["message"])
                self.stopped.wait(0.05)
            except TimeoutError:
                self.wrong.append(f"{text!r} hangs")
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{error!r}")
                self.stopped.wait(0.05)
            else:
                if answer != text:
                    self.wrong.append(f"{answer!r}, not {text!r}")
                self.num_right += 1

    def goes_on(self):
        """A condition: every client could be answered once more."""
        seen = self.num_right
        return lambda: self.num_right > seen + 2 * NUM_CLIENTS

    def stop(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join(ANSWER_TIMEOUT_S + 5)


def test_no_request_gets_a_wrong_text(host):
    mesh = host.up(*MESH)
    host.wait_until(lambda: "ready at" in mesh.log.read_text(), "the ready line")
    load = Load(host)
    failed = {}
    try:
        before = host.ps()
        for actor_id in sorted(before.keys() - {"supervisor"}):
            host.wait_until(load.goes_on(), "requests are answered")
            num_errors = len(load.errors)
            os.kill(before[actor_id]["pid"], signal.SIGKILL)
            host.wait_until(
                lambda actor_id=actor_id: (
                    (now := host.ps()[actor_id])["epoch"] > before[actor_id]["epoch"] and now["state"] == "ready"
                ),
                f"{actor_id} is replaced",
            )
            host.wait_until(load.goes_on(), f"requests are answered after the death of {actor_id}")
            failed[actor_id] = load.errors[num_errors:]
    finally:
        load.stop()
    assert not load.wrong, failed
    assert not failed.get("registry"), "everybody knows each other without it"
    mesh.terminate()
    assert mesh.wait(30) == 0, failed
    host.assert_nothing_left()
