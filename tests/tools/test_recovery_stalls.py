"""What the benchmark of recovery counts as a stall, and for how long."""

from benchmarks.recovery import Load
from cli.bench.answer import Sample


def test_a_stall_is_as_long_as_no_token_came_after_the_blow() -> None:
    load = Load(0, 0)
    before, after = Sample(9.0), Sample(11.0)
    before.event_times_s = [9.9, 11.5, 11.6]
    after.event_times_s = [11.1 + 0.1 * number for number in range(30)] + [14.3, 14.4]
    after.event_times_s[20:] = [moment + 0.3 for moment in after.event_times_s[20:]]
    load.samples = [before, after]
    found = load.stalls(10.0, 6.0)
    assert [round(stall_s, 2) for stall_s in found] == [1.5, 0.4], "a short pause later is not counted from the blow"
