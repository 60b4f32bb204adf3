"""The JSON Schema Test Suite, out of `jsonschema`'s source archive: each schema is refused by name, or enforced.

Every schema of a case is checked as a strict one. If it passes, an editor takes the case's valid documents as they are
written here, and what is drawn at random is valid. What it must not take are documents that the suite calls invalid.
"""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nodes.asks import InvalidAsk, check_asks, open_asks
from nodes.asks.matching import GrammarFailed
from tests.nodes.asks.grammars import MODEL, edits_of, ids_of, schema_of, sent, text_of, walk

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(900)]

DRAFT = "draft2020-12"
NAMED = "response_format.json_schema.schema"
CODES = ("invalid_value", "unsupported_schema")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The groups of each file of one draft."""
    folder = tmp_path_factory.mktemp("jsonschema")
    what = ["--no-deps", "--no-binary", ":all:", "jsonschema", "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *what], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as found:
        files = [
            one for one in found.getmembers() if f"/json/tests/{DRAFT}/" in one.name and "/optional/" not in one.name
        ]
        return {Path(one.name).stem: json.load(found.extractfile(one)) for one in files if one.name.endswith(".json")}  # type: ignore[arg-type]


def takes(asks: Any, document: Any) -> bool:
    """Whether an editor lets this document be drawn, written without spaces, and then the end."""
    editors, output = (
        open_asks(asks, MODEL).editors,
        ids_of(json.dumps(document, ensure_ascii=False, separators=(",", ":"))),
    )
    try:
        for size in range(len(output)):
            if not edits_of(editors, output[:size]).allows(output[size]):
                return False
        return edits_of(editors, output).allows(MODEL.end_token_ids[0])
    except GrammarFailed:
        return False


def test_every_schema_is_refused_by_name_or_enforced(suite: dict[str, list[dict[str, Any]]]) -> None:
    refused: list[tuple[str, str | None, str]] = []
    taken = num_valid = num_taken = 0
    wrong: list[str] = []
    for name, groups in suite.items():
        # It counts as anyOf: `docs/operations.md` says so.
        for group in groups if name != "oneOf" else ():
            schema = group["schema"]
            # Clients send objects.
            if not isinstance(schema, dict):
                continue
            try:
                asks = sent(response_format=schema_of(schema, strict=True))
                check_asks(asks)
            except InvalidAsk as error:
                refused.append((error.code, error.param, f"{name}: {error.message}"))
                continue
            taken += 1
            where = f"{name}: {group['description']}"
            for case in group["tests"]:
                is_taken = takes(asks, case["data"])
                num_valid += case["valid"]
                num_taken += case["valid"] and is_taken
                if is_taken and not case["valid"]:
                    wrong.append(f"{where}: {case['description']}")
            output, has_ended = walk(asks, 1, 60)
            if has_ended:
                try:
                    jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(output)))
                except jsonschema.ValidationError as error:
                    wrong.append(f"{where}: drew {text_of(output)!r}: {error.message}")
    print(f"{taken} schemas taken, {len(refused)} refused; {num_taken} of {num_valid} valid documents allowed")
    assert {(code, param) for code, param, _ in refused} <= {(code, NAMED) for code in CODES}
    assert taken > 100
    assert num_taken > 0.9 * num_valid
    assert not wrong, "\n".join(wrong)
