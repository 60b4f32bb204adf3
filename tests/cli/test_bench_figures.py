"""What `meshctl bench` sends, and what it makes of times: workloads, percentiles, limits of the client, the chart."""

import json
import xml.etree.ElementTree as ElementTree
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.answer import Sample
from cli.bench.chart import chart
from cli.bench.loops import Run
from cli.bench.report import foot_lines, head_lines, rows, turn_line
from cli.bench.summary import ratios, spread, summarize, times_ms
from cli.bench.workload import BadWorkload, Given, Made, Traced, due_times, read_prompts, read_trace

TRACE = """
{"timestamp": 1000, "input_length": 1030, "output_length": 50, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [7, 5]}
{"timestamp": 2000, "input_length": 700, "output_length": 4}
"""


def sample(start_s: float, *events_s: float, tokens: int, end_s: float | None = None, failure: str = "") -> Sample:
    end_s = events_s[-1] if end_s is None else end_s
    return Sample(start_s, array("d", events_s), tokens, 10, 4, end_s, failure, f"told of {failure}")


def run(*samples: Sample, wall_s: float = 2.0, cpu_s: float = 0.1, late_s: tuple[float, ...] = ()) -> Run:
    return Run(list(samples), array("d", late_s), array("d", [0.001] * 20), 0.0, wall_s, cpu_s)


def test_times_of_whole_answers_only() -> None:
    summary = summarize(
        run(
            sample(1.0, 1.1, 1.3, 1.4, tokens=4),
            sample(1.0, 1.5, 1.6, tokens=1),
            sample(1.0, 9.0, tokens=9, failure="reset"),
            sample(1.0, 9.0, tokens=9, end_s=0.0),
        )
    )
    assert (summary.num_requests, summary.num_whole, summary.failures) == (3, 2, {"reset": 1})
    assert summary.examples == {"reset": "told of reset"}
    assert (summary.num_output_tokens, summary.tokens_per_s, summary.requests_per_s) == (5, 2.5, 1.0)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (20, 8)
    ttft, itl, tpot, e2e = summary.ttft, summary.itl, summary.tpot, summary.e2e
    assert ttft and itl and tpot and e2e  # noqa: PT018 - for the type checker
    assert (ttft.count, itl.count, tpot.count, e2e.count) == (2, 3, 1, 2)
    assert (ttft.p50, ttft.p99) == pytest.approx((100, 500))
    assert tpot.p50 == pytest.approx(100), "from the first event to the last, over tokens less one"
    assert e2e.max == pytest.approx(600)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_values_at_or_above_their_rank(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value in values
        assert sum(other <= value for other in values) >= share * len(values) - 1e-9
        assert sum(other < value for other in values) < share * len(values)
    assert (found.count, found.max) == (len(values), max(values))


def test_a_run_without_an_answer() -> None:
    summary = summarize(run(sample(1.0, tokens=0, end_s=2.0, failure="connect")))
    assert (summary.ttft, summary.num_whole, summary.tokens_per_s) == (None, 0, 0.0)
    assert rows(summary)[0] == ["TTFT", "0", "-", "-", "-", "-", "-"]
    assert foot_lines(summary)[0] == "failed: 1 connect (told of connect)"
    assert summarize().num_requests == 0
    assert "<svg" in chart("none", {"a": times_ms([])})


def test_the_client_says_when_it_was_the_limit() -> None:
    one = sample(1.0, 1.1, tokens=2)
    assert not summarize(run(one, late_s=(0.001, 0.01))).client_limits
    (busy,) = summarize(run(one, cpu_s=1.9)).client_limits
    assert "0.95 cores" in busy
    (late,) = summarize(run(one, late_s=(0.001, 0.03))).client_limits
    assert "30 ms" in late
    assert not summarize(run(sample(1.0, 2.0, tokens=2), late_s=(0.03,))).client_limits, "nothing to a second"
    assert foot_lines(summarize(run(one, late_s=(0.03,))))[-1].startswith("the client was the limit: ")


def test_a_server_that_knows_less_than_most_and_what_to_do() -> None:
    def foot(detail: str, failure: str = "status 422") -> list[str]:
        one = replace(sample(1.0, tokens=0, end_s=2.0, failure=failure), detail=detail)
        return foot_lines(summarize(run(one)))[1:-1]

    assert foot("Unexpected fields in the request: {'ignore_eos'}") == [
        "this server does not know ignore_eos: leave it out for both with --no-ignore-eos"
    ]
    assert foot("prompt must be a string.", "status 400")[0].startswith("this server takes no token ids: give texts")
    assert foot("ignore_eos", "status 500") == [], "it may have failed for any reason"


def test_what_people_read() -> None:
    summary = summarize(run(sample(1.0, 1.1, 2.5, tokens=3)))
    assert head_lines(summary) == [
        "1 of 1 requests whole in 2.0 s, 0.50/s",
        "3 tokens of output, 1.5/s; 10 of prompts, 40% cached",
    ]
    assert [row[:4] for row in rows(summary)] == [
        ["TTFT", "1", "100.0", "100.0"], ["ITL", "1", "1,400", "1,400"], ["TPOT", "1", "700.0", "700.0"],
        ["E2E", "1", "1,500", "1,500"],
    ]  # fmt: skip
    assert turn_line("u", summary).split() == ["u", "100.0", "100.0", "1,400", "1,400", "1,500", "1,500", "1.5", "1/1"]


def test_ratios_are_of_pairs() -> None:
    def at(ttft_s: float, wall_s: float) -> Run:
        return run(sample(0.0, ttft_s, tokens=1), wall_s=wall_s)

    pairs = [
        (summarize(at(a, 1.0)), summarize(at(b, 2.0))) for a, b in ((0.1, 0.2), (0.3, 0.1), (0.1, 0.1), (0.1, 0.1))
    ]
    found = ratios(pairs)
    assert found["ttft_p50"] == pytest.approx((0.5, 1.0, 3.0))
    assert found["tokens_per_s"] == (2.0, 2.0, 2.0)
    assert "itl_p50" not in found, "there are no gaps"


def test_prompts_share_a_prefix_and_nothing_else() -> None:
    made = Made(num_requests=3, num_prompt=200, num_output=7, num_shared=50)
    prompts = [made.body(number, turn)["prompt"] for turn in (0, 1) for number in (0, 1, 2, 3)]
    assert {len(prompt) for prompt in prompts} == {200}
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 1
    assert len({tuple(prompt[50:58]) for prompt in prompts}) == len(prompts)
    assert made.body(1, 1) == made.body(1, 1), "two servers get the same"
    assert all(10 <= token < 250 for prompt in prompts for token in prompt)
    (message,) = Made(num_requests=1, num_prompt=9, num_output=1, endpoint="chat").body(0, 0)["messages"]
    assert len(message["content"].split()) == 9


def test_arrivals() -> None:
    assert due_times(4.0, 3, "constant", 1) == [0.25, 0.5, 0.75]
    times = due_times(10.0, 4000, "poisson", 1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert 390 < times[-1] < 410
    # Exponential: a share of 1/e is longer than the mean.
    assert 0.34 < sum(gap > 0.1 for gap in gaps) / len(gaps) < 0.4


def test_a_trace_is_sent_as_it_came() -> None:
    lines = read_trace(TRACE)
    traced = Traced(lines, 3, speed=2.0)
    assert traced.due_s == [0.0, 0.5, 1.0]
    first, second, third = (traced.body(number, 0) for number in range(3))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in (first, second, third)] == [
        (1030, 50), (700, 4), (600, 3)
    ]  # fmt: skip
    assert first["prompt"][:512] == third["prompt"][:512], "the block of id 7"
    assert first["prompt"][512:520] != third["prompt"][512:520]
    assert second["prompt"][:8] not in (first["prompt"][:8], third["prompt"][:8])
    small = Traced(lines, 3, scale=0.1)
    first, _, third = (small.body(number, 0) for number in range(3))
    assert (len(first["prompt"]), first["max_tokens"], len(third["prompt"]), third["max_tokens"]) == (103, 5, 60, 1)
    assert first["prompt"][:51] == third["prompt"][:51]
    assert first["prompt"][51:55] != third["prompt"][51:55]
    assert first["prompt"][:51] != small.body(0, 1)["prompt"][:51], "another turn has other prompts"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no lines"),
        ("1\n", "line 1"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n{"timestamp": 1}', "line 2.*input_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1"),
    ],
)
def test_a_trace_that_is_none(text: str, told: str) -> None:
    with pytest.raises(BadWorkload, match=told):
        read_trace(text)


def test_prompts_of_a_file() -> None:
    text = 'plain text\n\n"as \\"JSON\\""\n{"prompt": [1, 2], "max_tokens": 3, "user": "x"}\n'
    lines = read_prompts(text, "completions")
    assert lines == [{"prompt": "plain text"}, {"prompt": 'as "JSON"'}, {"prompt": [1, 2], "max_tokens": 3}]
    file = Given(lines, 5, 64)
    assert [file.body(number, 0)["max_tokens"] for number in range(5)] == [64, 64, 3, 64, 64]
    assert file.body(3, 0)["prompt"] == "plain text"
    messages = [{"role": "user", "content": "hi"}]
    assert read_prompts(f"hi\n{json.dumps({'messages': messages})}", "chat") == [{"messages": messages}] * 2
    for text, endpoint, told in (
        ('{"messages": []}', "completions", "line 1 has no `prompt`"),
        ('x\n{"prompt": [1]}', "chat", "line 2 has neither"),
        ('{"prompt', "chat", "line 1"),
    ):
        with pytest.raises(BadWorkload, match=told):
            read_prompts(text, endpoint)  # pyright: ignore[reportArgumentType]


def test_the_chart_is_small_and_says_whose_curve_is_whose() -> None:
    many = {name: [float(number % 977) for number in range(20_000)] for name in ("ttft", "itl", "tpot", "e2e")}
    text = chart("a <b> & c", {"http://one": many, "http://<two>": {**many, "ttft": [5.0]}})
    tree = ElementTree.fromstring(text)
    texts = {node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert texts >= {"a <b> & c", "http://one", "http://<two>", "100", "90 %"}
    curves = tree.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 6
    points = [tuple(map(float, point.split(","))) for point in curves[0].attrib["points"].split()]
    assert all(-0.1 <= x <= 280.1 and -0.1 <= y <= 180.1 for x, y in points)
    assert points == sorted(points, key=lambda point: (point[0], -point[1])), "it never falls"
    assert len(text) < 30_000
