"""What is told of a storm that failed."""

from array import array
from pathlib import Path

import pytest

from cli.chaos.asked import Request
from cli.chaos.clients import Sent
from tests.chaos.storm_report import StormReport


def test_a_report_has_what_died_before_a_gap_and_what_was_open_in_it(tmp_path: Path) -> None:
    whole = Sent(Request({}, 1), 100.0, 109.0, request_id="cmpl-whole", event_times_s=array("d", [101.0, 101.1, 108.5]))
    lost = Sent(Request({}, 2), 101.5, 109.0, lost="after 7.5 s: error_event: no", event_times_s=array("d", [102.0]))
    early = Sent(Request({}, 3), 100.0, 100.5, request_id="cmpl-early", event_times_s=array("d", [100.2]))
    times = sorted([*whole.event_times_s, *lost.event_times_s, *early.event_times_s])
    report = StormReport([whole, lost, early], [(102.5, "worker-0", 7), (80.0, "registry", 8)], times, 100.0, 109.0)
    assert report.longest_gap_s == pytest.approx(6.5)
    report.write(tmp_path / "storm.txt")
    told = (tmp_path / "storm.txt").read_text()
    first, _, longest = told.partition("longest times")
    assert "3 requests, 1 lost or different" in first
    assert "2.500 s worker-0 pid 7" in first
    assert "no id, body 2: after 7.5 s: error_event: no" in first
    longest = longest.split(": 6.50 s\n")[1].split("\n0.200 s to")[0]
    assert "2.500 s worker-0 died" in longest
    assert "registry" not in longest
    assert "cmpl-whole, body 1: whole" in longest
    assert "1.100 s to 8.500 s: nothing after event 2" in longest
    assert "cmpl-early" not in longest.split(" s to ")[0]
