"""What `meshctl kv` prints, and that it forgets nothing unasked."""

import io
import json
import re
from typing import Any

import pytest
import typer

from cli.commands import kv
from cli.errors import WrongUsage
from cli.exit_codes import ExitCode
from cli.trace.pages import summary, what
from kvstore.protocol import MissedPages
from kvstore.store import missing
from nodes.protocol.records import CallRecord, CallsFound, FindCalls, SampleRecord
from nodes.protocol.stores import (
    AgentStores,
    FatesFound,
    FindFates,
    FlushedStore,
    FlushStores,
    PageRun,
    PromptFate,
    StoreFacts,
    StoreList,
    StoreReader,
    StoresFlushed,
)
from nodes.scheduler import fates

COUNTS = {
    "queried": 4000, "found": 3000, "read": 2900, "stale": 7, "corrupt": 2, "unsigned": 3, "unreadable": 1,
    "written": 5000, "evicted": 60,
}  # fmt: skip
OPEN = StoreFacts(
    folder="kv-1", is_open=True, is_loaded=True, groups=["decode-0", "prefill-0"], layout="ab" * 16, numerics="torch",
    num_pages=1234, num_slots=2000, num_bytes=8 << 20, used_s=61.0, num_queued=5, counts=COUNTS,
)  # fmt: skip
OTHER = StoreFacts(folder="kv-2", num_bytes=1 << 20, used_s=-1.0)
READER = StoreReader(scheduler="scheduler-decode-0", pages_per_s=2500.0, num_queried=40, num_dearer=1)
KEPT = AgentStores(
    agent="kv-agent-0",
    directory="/kv",
    size_bytes=8 << 20,
    stores=[OPEN, OTHER],
    dropped={"queue_full": 0, "changed": 3},
)
LIST = StoreList(agents=[KEPT], readers=[READER], silent=["kv-agent-0.b"])


class Mesh:
    """A mesh whose supervisor answers so."""

    def __init__(self, found: StoreList) -> None:
        self.found = found
        self.flushed: list[FlushStores] = []

    def ask(self, question: Any, _: Any, __: float) -> Any:
        if isinstance(question, FlushStores):
            self.flushed.append(question)
            one = FlushedStore(agent="kv-agent-0", folder="kv-1", num_pages=1234)
            return StoresFlushed(flushed=[one] * bool(self.found.agents), note="host c is away")
        return self.found


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    mesh = Mesh(LIST)
    monkeypatch.setattr(kv, "find_mesh", lambda _: mesh)
    return mesh


def test_stores_are_rows(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv.ls("m", "table") == ExitCode.OK
    told = capsys.readouterr()
    lines = [line.split() for line in told.out.splitlines()]
    used = ["1", "m", "1", "s", "ago"]
    assert lines[1] == ["kv-agent-0", "kv-1", "1,234", "2,000", "8.0", "MiB", *used, "1", "abababababab", "torch"]
    assert lines[2] == ["kv-agent-0", "kv-2", "not", "open", "-", "1.0", "MiB", "-", "-", "-", "-"]
    assert "kv-agent-0.b does not answer" in told.err
    assert kv.ls("m", "json") == ExitCode.OK
    assert '"num_pages": 1234' in capsys.readouterr().out


def test_a_mesh_without_a_disk_says_so(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    mesh.found = StoreList(agents=[])
    assert kv.ls("m", "table") == ExitCode.OK
    told = capsys.readouterr()
    assert (told.out, "--kv-disk" in told.err) == ("", True)
    assert kv.flush("m", [], yes=True, output="table") == ExitCode.OK
    assert "nothing to forget" in capsys.readouterr().err


def test_stats_say_what_became_of_pages(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    kv.stats("m", "table")
    told = capsys.readouterr().out
    for text in (
        "kv-1: 1,234 of 2,000 pages for decode-0, prefill-0, 5 wait to be written",
        "I/O is direct",
        "asked for 4,000 pages, had 3,000; read 2,900, 7 were gone, 2 refused by checksum, 3 refused by signature, "
        "1 not read",
        "not stored: 3 changed\n",
        "scheduler-decode-0  2,500 pages/s  -",
    ):
        assert text in told
    assert "kv-2" not in told
    bad = StoreFacts(folder="kv-1", is_open=True, why_buffered="no", why_read_only="8 writes failed", counts=COUNTS)
    mesh.found = StoreList(agents=[AgentStores(agent="a", directory="/kv", size_bytes=1, stores=[bad])])
    kv.stats("m", "table")
    told = capsys.readouterr().out
    assert "I/O is through the kernel's cache: no\n    only read: 8 writes failed\n" in told
    assert "not stored: none" in told
    kv.stats("m", "json")
    assert '"why_read_only": "8 writes failed"' in capsys.readouterr().out


def test_nothing_is_forgotten_unasked(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(WrongUsage, match="without being told"):
        kv.flush("m", [], yes=False, output="table")
    assert "kv-agent-0 will forget 1,234 pages of kv-1." in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", _no)
    with pytest.raises(typer.Abort):
        kv.flush("m", [], yes=False, output="table")
    assert mesh.flushed == []
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: True)
    assert kv.flush("m", ["kv-1"], yes=False, output="table") == ExitCode.OK
    told = capsys.readouterr()
    assert told.out == "kv-agent-0 has forgotten 1,234 pages of kv-1\n"
    assert "host c is away" in told.err
    assert kv.flush("m", [], yes=True, output="json") == ExitCode.OK
    assert '"num_pages": 1234' in capsys.readouterr().out
    assert [wish.folders for wish in mesh.flushed] == [["kv-1"], []]


FATES = [
    PromptFate(
        request_id="c-0", attempt=1, scheduler="scheduler-d", prefill="scheduler-p", page_size=16,
        runs=[PageRun(why=why, first=first, num=num) for why, first, num in (
            ("cached", 0, 12), ("restored", 12, 1), ("evicted", 13, 1), ("of a later release", 14, 2),
            ("evicted", 16, 2),
        )],
    ),
    PromptFate(request_id="c-0", attempt=1, scheduler="scheduler-p", is_order=True, page_size=16),
]  # fmt: skip


class Calls:
    """A mesh whose gateways know one call, or none."""

    def __init__(self, *calls: CallRecord) -> None:
        self.calls = calls
        self.asked: list[Any] = []

    def ask(self, question: Any, _: Any, __: float) -> Any:
        self.asked.append(question)
        if isinstance(question, FindCalls):
            return CallsFound(calls=[*self.calls], num=len(self.calls), silent=["gateway-9"])
        return FatesFound(fates=FATES if self.calls[-1].request_id == "c" else [])


def test_why_says_what_became_of_each_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Calls(CallRecord(request_id="b"), CallRecord(request_id="c", samples=[SampleRecord(request_id="c-0")]))
    monkeypatch.setattr(kv, "find_mesh", lambda _: mesh)
    assert kv.why("m", "mine", "table") == ExitCode.OK
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "c-0 at scheduler-d, attempt 1: 18 full pages of 16 tokens",
        "  pages 0 to 11   cached",
        "  page 12         read from the disk",
        "  page 13         computed: evicted for others",
        "  pages 14 to 15  computed: of a later release",
        "  pages 16 to 17  computed: evicted for others",
        "  what was computed, scheduler-p has computed or found",
        "c-0 at scheduler-p, for another scheduler, attempt 1: 0 full pages of 16 tokens",
    ]
    assert "gateway-9 does not answer" in told.err
    assert "1 more have this name" in told.err
    assert mesh.asked == [FindCalls(name="mine", whole_mesh=True), FindFates(request_ids=["c", "c-0"])]
    assert kv.why("m", "", "json") == ExitCode.OK
    assert mesh.asked[2] == FindCalls(last=1, whole_mesh=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["runs"][1], second["is_order"], first["is_order"]) == (
        {"why": "restored", "first": 12, "num": 1},
        True,
        False,
    )
    (line,) = summary(FATES)
    assert line.startswith(
        "  pages at scheduler-d: 12 cached, 1 read from the disk, 3 computed: evicted for others, 2 "
    )


def test_a_call_that_nobody_knows_and_one_that_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv, "find_mesh", lambda _: Calls())
    with pytest.raises(WrongUsage, match="no call named 'mine'"):
        kv.why("m", "mine", "table")
    with pytest.raises(WrongUsage, match="no call has ended yet"):
        kv.why("m", "", "table")
    monkeypatch.setattr(kv, "find_mesh", lambda _: Calls(CallRecord(request_id="old")))
    assert kv.why("m", "", "table") == ExitCode.OK
    assert "no scheduler remembers old" in capsys.readouterr().err


def test_every_reason_has_words() -> None:
    said = " ".join((PageRun.__doc__ or "", MissedPages.__doc__ or ""))
    for why in (*vars(fates).values(), *vars(missing).values(), *re.findall(r"`([a-z]+_[a-z_]+)`", said)):
        if isinstance(why, str) and re.fullmatch(r"[a-z_]{4,20}", why):
            assert what(why) != f"computed: {why}", f"{why} has no words"


def _no(*_: Any, abort: bool, **__: Any) -> bool:
    assert abort
    raise typer.Abort
