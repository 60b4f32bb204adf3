"""What crosses the wire is what `vectors.json` and `session.json` say, and `docs/protocol.md` shows the same.

If a test here fails, the protocol has changed. Was that meant, and can older peers live with it? Then run
`python -m tools.protocol_reference` and commit the difference.
"""

import json
from pathlib import Path

import msgspec
import pytest

from mesh.wire.codec import open_envelope
from mesh.wire.header import Header
from tools.protocol_reference.samples import CODECS, message_types, plain
from tools.protocol_reference.session import record
from tools.protocol_reference.tables import fill

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
SESSION = json.loads((Path(__file__).parent / "session.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["bodies"], ids=lambda v: v["type"])
def test_body_decodes_and_encodes(vector):
    codec, data = CODECS[vector["protocol"]], bytes.fromhex(vector["hex"])
    message = codec.decode(data)
    assert type(message).__name__ == vector["type"]
    assert plain(message) == vector["value"]
    assert codec.encode(message) == data


@pytest.mark.parametrize("vector", VECTORS["headers"], ids=lambda v: v["verb"])
def test_header_decodes_and_encodes(vector):
    data = bytes.fromhex(vector["hex"])
    header = open_envelope((data, b""))
    assert plain(header) == vector["value"]
    assert msgspec.msgpack.encode(header) == data


def test_every_message_has_a_vector():
    known = {(v["protocol"], v["type"]) for v in VECTORS["bodies"]}
    assert known == {(protocol, kind.__name__) for protocol, kind in message_types()}


@pytest.mark.parametrize("vector", VECTORS["bodies"], ids=lambda v: v["type"])
def test_a_newer_peer_may_say_more(vector):
    data = bytes.fromhex(vector["hex"])
    message = msgspec.msgpack.decode(data)
    if vector["form"] == "array":
        message.append("of a later version")
    else:
        message["of_a_later_version"] = [1]
    decoded = CODECS[vector["protocol"]].decode(msgspec.msgpack.encode(message))
    assert plain(decoded) == vector["value"]


def test_a_newer_header_may_say_more():
    fields = [*msgspec.msgpack.decode(bytes.fromhex(VECTORS["headers"][3]["hex"])), "of a later version"]
    header = open_envelope((msgspec.msgpack.encode(fields), b""))
    assert plain(header) == VECTORS["headers"][3]["value"]
    assert isinstance(header, Header)


def test_a_session_is_the_recorded_one():
    assert record() == SESSION


def test_page_shows_what_the_code_does():
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert fill(page, SESSION) == page, "run `python -m tools.protocol_reference`"
