"""Every code by which a transfer fails in this repository has a name in a trace, and a series from the start."""

import re
from pathlib import Path

import kvstore
import nodes.kv_agent
from kvstore.transfer.failures import TRANSFER_FAILURES

_FAILS = re.compile(
    r"(?:TransferError|SourceRefused|Revoked|CopyEnded|PairUnmade|\b_?fail)\(\s*(?:copy_id, |command\.copy\.copy_id, )?"
    r'"([a-z_]+)"'
)
_NOT_OF_TRANSFERS = {"not_ready"}
"""An answer to an ask, not an end of a transfer."""


def test_all_codes_of_failures_are_listed() -> None:
    folders = [Path(*kvstore.__path__), Path(*nodes.kv_agent.__path__)]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    found = {code for source in sources for code in _FAILS.findall(source)}
    assert len(found) > 15, "the pattern still finds them"
    assert found - _NOT_OF_TRANSFERS <= set(TRANSFER_FAILURES)
    assert list(TRANSFER_FAILURES) == sorted(set(TRANSFER_FAILURES))
