"""Every code by which a transfer fails in this repository has a name in a trace, and a series from the start."""

import re
from pathlib import Path

import kvstore
import nodes.kv_agent
from kvstore.pool.page_pool import ShmHost
from kvstore.transfer.failures import TRANSFER_FAILURES
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.selection import Selection
from nodes.kv_agent.config import Bounds
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.metrics import gauges, transport_gauges

_FAILS = re.compile(
    r"(?:TransferError|SourceRefused|Revoked|CopyEnded|PairUnmade|\b_?fail)\(\s*(?:copy_id, |command\.copy\.copy_id, )?"
    r'"([a-z_]+)"'
)
_NOT_OF_TRANSFERS = {"not_ready", "no_store", "store_not_flushed", "store_not_open"}
"""Answers to asks, not ends of a transfer."""


def test_all_codes_of_failures_are_listed() -> None:
    folders = [Path(*kvstore.__path__), Path(*nodes.kv_agent.__path__)]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    found = {code for source in sources for code in _FAILS.findall(source)}
    assert len(found) > 15, "the pattern still finds them"
    assert found - _NOT_OF_TRANSFERS <= set(TRANSFER_FAILURES)
    assert list(TRANSFER_FAILURES) == sorted(set(TRANSFER_FAILURES))


def test_each_has_a_series_before_it_happens() -> None:
    figures = gauges(AgentCore("agent", [], Bounds()))
    assert {figures[f'mesh_kv_transfer_failures_total{{code="{code}"}}'] for code in TRANSFER_FAILURES} == {0.0}


def test_so_has_each_reason_for_which_a_connection_is_refused() -> None:
    class Listening(ShmTransport):
        refused = {"no_token": 0, "not_ours": 2}

    figures = transport_gauges(Selection({"host": Listening(ShmHost("/dev/shm"))}))
    refused = {name: value for name, value in figures.items() if "refused" in name}
    assert refused == {
        'mesh_kv_connections_refused_total{why="no_token"}': 0.0,
        'mesh_kv_connections_refused_total{why="not_ours"}': 2.0,
    }
