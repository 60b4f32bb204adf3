"""Custom actors built with the SDK: message bodies of their own, one actor that answers them, one that asks.

    python examples/words.py serve [--name MESH] [--actor-id ID]
    python examples/words.py ask TEXT [--name MESH] [--actor-id ID] [--wait SECONDS]

They use the same messages as `plain_peer.py`, so each can answer the other's questions.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from mesh.actor import Actor, Call
from mesh.errors import CallError, Superseded
from mesh.membership.view import Member
from mesh.run import run_actor, unsupervised
from mesh.runtime.run_directory import RunDirectory
from mesh.wire.codec import Codec
from mesh.wire.message import Message


class CountWords(Message, frozen=True):
    """Ask how many words a text has. Answer: `WordsCounted`."""

    text: str


class WordsCounted(Message, frozen=True):
    """Answer to `CountWords`."""

    num_words: int


class Words(Actor):
    """Answers `CountWords`. Runs until it is told to stop, through all restarts of the registry."""

    role: ClassVar[str] = "custom"
    codec: ClassVar[Codec] = Codec(CountWords | WordsCounted)

    @override
    def on_ask(self, call: Call) -> None:
        """A call that is answered neither now nor later fails at the asker's deadline."""
        match call.message:
            case CountWords(text=text):
                self.ctx.metrics.count("words_counted_total")
                call.reply(WordsCounted(num_words=len(text.split())))
            case _:
                super().on_ask(call)


class Asker(Actor):
    """Asks once, as soon as `target` is a member, and ends."""

    role: ClassVar[str] = "custom"
    codec: ClassVar[Codec] = Words.codec

    def __init__(self, target: str, text: str, wait_s: float) -> None:
        self._target = target
        self._text = text
        self._wait_s = wait_s
        self._has_asked = False
        self.outcome = f"{target} is not a member of the mesh"
        self.num_words = -1

    @override
    async def start(self) -> None:
        self.ctx.later(self._wait_s, self.ctx.end, "no answer in time")

    @override
    def on_members(self, joined: Sequence[Member], left: Sequence[Member], changed: Sequence[Member]) -> None:
        """The first call has all members that are there."""
        if not self._has_asked and any(member.actor_id == self._target for member in joined):
            self._has_asked = True
            self.outcome = f"{self._target} does not answer"
            self.ctx.spawn(self._ask(), name="ask")

    async def _ask(self) -> None:
        try:
            answer = await self.ctx.ask(self._target, CountWords(text=self._text), timeout_s=self._wait_s)
        except CallError as error:
            self.outcome = f"{error.code}: {error.message}"
        else:
            self.num_words = answer.message.num_words
            self.outcome = f"{answer.sender} counts {self.num_words}"
        self.ctx.end("done")


def main() -> int:
    """Command line; the exit code is 1 if nobody answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("serve", "ask"))
    parser.add_argument("text", nargs="?", default="how many words are these")
    parser.add_argument("--name", default=os.environ.get("KVMESH_NAME") or "default", help="name of the mesh")
    parser.add_argument("--actor-id", default="words-0", help="id of the serving actor")
    parser.add_argument("--wait", type=float, default=10.0, metavar="SECONDS", help="seconds to wait for the answer")
    args = parser.parse_intermixed_args()  # or TEXT could not follow the options
    directory = RunDirectory.of_mesh(args.name)
    if not directory.registry_file.exists():
        sys.exit(f"no mesh {args.name} runs here ({directory.path}): start one with `meshctl up`")
    if args.what == "serve":
        try:
            return run_actor(Words(), unsupervised(args.actor_id), run_directory=directory)
        except Superseded as later:
            # Somebody has started this actor again elsewhere, under the same id: that is not a failure.
            print(later, file=sys.stderr)
            return 0
    asker = Asker(args.actor_id, args.text, args.wait)
    code = run_actor(asker, unsupervised(f"asker-{os.getpid()}"), run_directory=directory)
    print(asker.outcome)
    return code or int(asker.num_words < 0)


if __name__ == "__main__":
    sys.exit(main())
