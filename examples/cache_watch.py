"""A custom actor that follows topics: what every scheduler has in its prefix cache, and how busy it is.

    python examples/cache_watch.py [--name MESH]

Topics are numbered and replayed: a subscriber gets a snapshot and then every change, across restarts of either side, or
is told to start over.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from kvstore.protocol import CacheCleared, CacheEvents, PageRemoved, PagesStored
from mesh.actor import Actor
from mesh.address import Address
from mesh.membership.view import Member
from mesh.run import run_actor, unsupervised
from mesh.runtime.run_directory import RunDirectory
from mesh.wire.codec import Codec
from nodes.protocol import Load
from nodes.roles import KV_EVENTS_TOPIC, LOAD_TOPIC, SCHEDULER


class CacheWatch(Actor):
    """Prints a line for every publication."""

    role: ClassVar[str] = "custom"
    codec: ClassVar[Codec] = Codec(CacheEvents | Load)

    def __init__(self) -> None:
        self._pages: dict[str, set[bytes]] = {}

    @override
    def on_members(self, joined: Sequence[Member], left: Sequence[Member], changed: Sequence[Member]) -> None:
        """A subscription outlives its publisher: it goes on with the next incarnation."""
        for member in joined:
            if member.role == SCHEDULER and member.actor_id not in self._pages:
                self._pages[member.actor_id] = set()
                self.ctx.subscribe(member.actor_id, KV_EVENTS_TOPIC)
                self.ctx.subscribe(member.actor_id, LOAD_TOPIC)

    @override
    def on_subscription_reset(self, publisher: Address, topic: str) -> None:
        if topic == KV_EVENTS_TOPIC:
            self._pages[publisher.actor_id].clear()

    @override
    def on_publication(self, publisher: Address, topic: str, sequence: int, message: Any) -> None:
        name = publisher.actor_id
        match message:
            case CacheEvents(events=events):
                num_stored, num_removed = self._apply(self._pages[name], events)
                print(f"{name}: {num_stored} stored, {num_removed} removed, {len(self._pages[name])} held", flush=True)
            case Load():
                print(f"{name}: {message.num_running} running, {message.num_waiting} waiting,"
                      f" {message.num_free_pages} of {message.num_pages} pages free", flush=True)  # fmt: skip
            case _:
                pass

    @staticmethod
    def _apply(held: set[bytes], events: Sequence[PagesStored | PageRemoved | CacheCleared]) -> tuple[int, int]:
        num_stored = num_removed = 0
        for event in events:
            match event:
                case PagesStored(page_hashes=pages):
                    num_stored += len(set(pages) - held)
                    held.update(pages)
                case PageRemoved(page_hashes=pages):
                    num_removed += len(held & set(pages))
                    held.difference_update(pages)
                case CacheCleared():
                    num_removed += len(held)
                    held.clear()
        return num_stored, num_removed


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=os.environ.get("KVMESH_NAME") or "default", help="name of the mesh")
    args = parser.parse_args()
    directory = RunDirectory.of_mesh(args.name)
    if not directory.registry_file.exists():
        sys.exit(f"no mesh {args.name} runs here ({directory.path}): start one with `meshctl up`")
    return run_actor(CacheWatch(), unsupervised("cache-watch"), run_directory=directory)


if __name__ == "__main__":
    sys.exit(main())
