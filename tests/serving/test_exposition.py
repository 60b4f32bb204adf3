"""What a scrape of a whole mesh says, before and after an actor has died."""

import os
import signal
from typing import Any

import pytest

from cli.chaos.held import samples
from tests.nodes.gateway.exposition import badly_named, only_rising, what_is_invalid
from tests.process.conftest import wait_until
from tests.serving.conftest import APART

pytestmark = pytest.mark.process


def test_every_scrape_is_valid_and_what_only_rises_falls_where_its_actor_began_again_alone(mesh_of: Any) -> None:
    mesh = mesh_of(*APART)

    def scrape(num_tokens: int) -> str:
        body = {"prompt": "a word and " * 20, "max_tokens": num_tokens, "ignore_eos": True}
        assert mesh.post("/v1/completions", body)[0] == 200
        # On a busy machine an actor may not answer in time.
        page = wait_until(everybody_s, "a scrape that all actors have answered", 60.0)
        assert what_is_invalid(page) == []
        assert badly_named(page) == []
        assert "exported_" not in page
        assert not any(value for name, value in samples(page).items() if name.startswith("mesh_actor_series_refused"))
        return page

    def everybody_s() -> str:
        page = mesh.get("/metrics").decode()
        is_up = [value for name, value in samples(page).items() if name.startswith("mesh_actor_up")]
        return page if all(is_up) else ""

    def epochs() -> dict[str, int]:
        return {one["actor_id"]: one["epoch"] for one in mesh.ps() if one["state"] == "ready"}

    before, began = scrape(40), epochs()
    victim = "worker-decode-0"
    (pid,) = (one["pid"] for one in mesh.ps() if one["actor_id"] == victim)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: epochs().get(victim, 0) > began[victim], "another worker", 30.0)
    after = only_rising(scrape(2))
    fell = [key for key, value in only_rising(before).items() if after.get(key, value) < value]
    assert {dict(labels)["actor"] for _, labels in fell} <= {victim}
