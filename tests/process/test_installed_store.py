"""Pages in a store that another package brings: found by its entry point, and there for the next mesh."""

import os
import re

import pytest

from tests.kvstore.store.installed import distribution
from tests.process.test_disk import complete, figure

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_what_the_example_has_kept_is_restored_after_a_restart(host):
    path = os.pathsep.join(map(str, distribution.write_example(host.base / "site")))
    pages = host.base / "pages"
    pages.mkdir(0o700)
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH")))),
        "KVMESH_KV__STORE__OPTIONS__PATH": str(pages),
    }
    options = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--kv-store", "folder")
    prompts = [f"{subject} has 7 green pears. " * 30 for subject in ("Ann", "Bob", "Eve", "Ted")]
    mesh = host.up(*options, **variables)
    texts = [complete(host, prompt)[0] for prompt in prompts]
    host.ends_well(mesh)
    mesh = host.up(*options, **variables)
    again = [complete(host, prompt) for prompt in prompts]
    assert [text for text, _ in again] == texts
    # On a busy machine an answer of the store may come too late for one of them, which is then computed.
    assert sum(cached >= 160 for _, cached in again) >= 2
    assert figure(host, "mesh_kv_store_off") == 0
    got = r'^mesh_kv_store_calls_total{(?=[^}]*call="get")[^}]*outcome="done"[^}]*} [1-9]'
    assert re.search(got, host.metrics(), re.MULTILINE)
    host.ends_well(mesh)
