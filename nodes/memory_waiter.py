"""What to ask next until worker groups have released their memory, or taken it again. Pure.

Used by `meshctl release` and `resume`, and by the gateway's `/release_memory_occupation` and its opposite.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from nodes.protocol.memory import GroupMemory, ListMemory, ReleaseMemory, ResumeMemory

LOOK_INTERVAL_S: Final = 0.2
"""Each look asks the supervisor, which asks agents; releasing and resuming take seconds."""

TOWARDS: Final = {"released": ("releasing", "released"), "held": ("resuming", "held")}
"""For each state to wait for, the states of a group that is on the way there or has arrived."""

MemoryRequest = ReleaseMemory | ResumeMemory


class WishUndone(Exception):
    """Somebody else asked for the opposite of `state` for these groups."""

    def __init__(self, groups: Sequence[GroupMemory], state: str) -> None:
        self.groups = groups
        other = "resumed" if state == "released" else "released"
        self.what = (
            f"{', '.join(group.group for group in groups)} not {state}: somebody else {other} it in the meantime"
        )
        self.why = "; ".join(progress(group) for group in groups)
        super().__init__(f"{self.what} ({self.why})")


class MemoryWaiter:
    """Waits for groups to be in a state, `released` or `held`.

    A request is repeated until it is answered and accepted; from then on only its progress is looked at. Repeated any
    further it would undo what somebody else asks for meanwhile.
    """

    def __init__(self, request: MemoryRequest, state: str) -> None:
        self.question: MemoryRequest | ListMemory = request
        self._request = request
        self._state = state
        self._meant = set(request.groups)
        self._taken: set[str] = set()
        self._seen: dict[str, GroupMemory] = {}

    @property
    def groups(self) -> list[GroupMemory]:
        return [self._seen[name] for name in sorted(self._seen)]

    @property
    def left(self) -> list[str]:
        return sorted(name for name in self._meant if name not in self._seen or self._seen[name].state != self._state)

    @property
    def is_done(self) -> bool:
        return bool(self._meant) and not self.left

    @property
    def told(self) -> str:
        """How far the groups are that are not there yet."""
        return "; ".join(progress(group) for group in self.groups if group.group in self.left)

    def answered(self, groups: list[GroupMemory], is_restarted: Callable[[], bool]) -> None:
        """Take the answer to `question`. `is_restarted`: an agent ended since the request was made.

        Raises WishUndone.
        """
        if self.question is not self._request or self._request.groups:
            groups = [group for group in groups if group.group in self._meant]
        self._meant |= {group.group for group in groups}
        self._seen |= {group.group: group for group in groups}
        towards = TOWARDS[self._state]
        back = {group.group for group in groups if group.group in self._taken and group.state not in towards}
        # A request that was tried and failed, or was lost with an agent that died, is made again.
        undone = [group for group in groups if group.group in back and not (group.state == "released" and group.reason)]
        if undone and not is_restarted():
            raise WishUndone(undone, self._state)
        self._taken -= back
        self._taken |= {group.group for group in groups if group.state in towards}
        late = sorted(self._meant - self._taken)
        self.question = msgspec.structs.replace(self._request, groups=late) if late else ListMemory()


def progress(group: GroupMemory) -> str:
    waits = f", waiting for {', '.join(group.waiting_for)}" if group.waiting_for else ""
    return f"{group.group} {group.state}{waits}" + (f" ({group.reason})" if group.reason else "")
