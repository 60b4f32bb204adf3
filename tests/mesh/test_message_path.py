"""The way of a message through `mesh/` is the one that `docs/architecture.md` shows, and short."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.mesh.mesh_under_test import Say, SystemOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
QUIET = SystemOptions(heartbeat_s=60.0, renew_subscription_s=60.0)


class Walk:
    """Which functions of `mesh/` are called while one value goes its way, in order."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def look(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "mesh"):
            self.calls.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    @property
    def files(self):
        return {path for path, _ in self.calls}


def shown_on_the_page():
    section = PAGE[PAGE.index("Over the mesh a tell takes these") : PAGE.index("An ask goes the same way")]
    for path, names in re.findall(r"`(mesh/[\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+)", section):
        for name in re.findall(r"`([\w.]+)`", names):
            yield path, name


@pytest.mark.parametrize("on_mesh", ["zeromq on asyncio"], indirect=True)
def test_a_tell_and_an_ask_go_the_way_that_the_page_shows(on_mesh):
    async def test(mesh):
        a, b = await mesh.pair(options=QUIET)
        await a.actor.ctx.ask("b", Say(text="are links up?"), timeout_s=5)
        for system in mesh.systems.values():
            system.heartbeats.close()
        # What follows the members' news is over: nothing else is on its way.
        await asyncio.sleep(0.5)
        with Walk() as tell:
            a.actor.ctx.tell("b", Say(text="one"))
            while not b.actor.told:
                await asyncio.sleep(0)
        with Walk() as ask:
            await a.actor.ctx.ask("b", Say(text="two"), timeout_s=5)
        places = [tell.calls.index(step) for step in shown_on_the_page()]
        assert len(places) > 9
        assert places == sorted(places), "in the order of the page"
        assert len(tell.files) <= 6, tell.files
        assert len(ask.files) <= 8, ask.files

    on_mesh(test)
