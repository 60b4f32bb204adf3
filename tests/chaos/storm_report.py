"""What a storm was, for whoever reads of its failure: deaths, answers that were lost, different or late, and when."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cli.chaos.clients import NOTED_GAP_S, Sent

NUM_GAPS: Final = 12
_BEFORE_S: Final = 10.0
"""What died so long before a gap may be why: a gateway is there again after twice that at the latest."""

Death = tuple[float, str, int]
"""When, by `time.monotonic`; of whom; its pid."""


class StormReport:
    """Of requests that have ended, over the time from `began_s` to `ended_s`."""

    def __init__(
        self, sent: Sequence[Sent], deaths: Sequence[Death], times_s: Sequence[float], began_s: float, ended_s: float
    ) -> None:
        self._sent = sent
        self._deaths = deaths
        self._began_s = began_s
        every = [began_s, *times_s, ended_s]
        self.gaps = sorted(itertools.pairwise(every), key=lambda gap: gap[0] - gap[1])[:NUM_GAPS]

    @property
    def longest_gap_s(self) -> float:
        return self.gaps[0][1] - self.gaps[0][0]

    def write(self, to: Path) -> None:
        """All of it, as text."""
        bad = [one for one in self._sent if one.lost or one.different]
        lines = [f"{len(self._sent)} requests, {len(bad)} lost or different", "", "deaths"]
        lines += [f"  {self._at(at)} {name} pid {pid}" for at, name, pid in self._deaths]
        lines += ["", "lost or different"]
        for one in bad:
            lines += self._story(one)
        lines += ["", "longest times without an event, and what was open meanwhile"]
        for start, end in self.gaps:
            lines.append(f"{self._at(start)} to {self._at(end)}: {end - start:.2f} s")
            lines += [f"  {self._at(at)} {name} died" for at, name, _ in self._deaths if start - _BEFORE_S < at < end]
            for one in self._sent:
                if one.began_s < end and one.ended_s > start:
                    lines += [f"  {line}" for line in self._story(one)]
        to.write_text("\n".join(lines) + "\n")

    def _story(self, one: Sent) -> list[str]:
        """A request with the pauses in its events, which go on at the pace of a busy mesh otherwise."""
        what = one.lost or one.different or ("cut with its gateway" if one.is_cut else "whole")
        lines = [f"{one.request_id or 'no id'}, body {one.request.index}: {what}"]
        lines.append(f"  sent {self._at(one.began_s)}, {len(one.event_times_s)} events, over {self._at(one.ended_s)}")
        every = [one.began_s, *one.event_times_s, one.ended_s]
        for number, (before, after) in enumerate(itertools.pairwise(every)):
            if after - before >= NOTED_GAP_S:
                lines.append(f"  {self._at(before)} to {self._at(after)}: nothing after event {number}")
        return lines

    def _at(self, when_s: float) -> str:
        return f"{when_s - self._began_s:.3f} s"
