"""What the gateway uses of the inside of uvicorn. A newer one is allowed in pyproject.toml when this passes with it."""

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

OVERRIDDEN = {
    uvicorn.Server: {"capture_signals": ["self"], "main_loop": ["self"]},
    HttpToolsProtocol: {
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "data_received": ["self", "data"],
        "on_message_begin": ["self"],
        "on_url": ["self", "url"],
        "on_header": ["self", "name", "value"],
        "on_headers_complete": ["self"],
        "on_body": ["self", "body"],
        "on_message_complete": ["self"],
        "on_response_complete": ["self"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
        "timeout_keep_alive_handler": ["self"],
        "send_400_response": ["self", "msg"],
        "_start_asgi_task": ["self", "cycle", "app"],
    },
}
CALLED = {
    uvicorn.Server: {"on_tick": ["self", "counter"], "startup": ["self", "sockets"], "shutdown": ["self", "sockets"]},
    uvicorn.Config: {"load": ["self"]},
    HttpToolsProtocol: {"_unset_keepalive_if_required": ["self"]},
}

ATTRIBUTES = [
    "client", "cycle", "flow", "headers", "keep_alive", "loop", "parser", "pipeline", "server_state", "transport",
    "url", "chunked_encoding", "disconnected", "message_event", "more_body", "response_complete", "response_started",
    "scope", "connections", "scheme",
]  # fmt: skip
"""Of the protocol, and of its cycle of request and answer."""


@pytest.mark.parametrize("hooks", [OVERRIDDEN, CALLED])
def test_methods_are_there_with_their_parameters(hooks: dict) -> None:
    for owner, methods in hooks.items():
        for name, parameters in methods.items():
            found = list(inspect.signature(getattr(owner, name)).parameters)
            assert found == parameters, f"{owner.__name__}.{name}"


def test_attributes_are_there() -> None:
    config = uvicorn.Config(lambda: None, http="httptools", ws="none", lifespan="off", loop="none", log_config=None)
    config.load()
    for name in ("encoded_headers", "http_protocol_class", "lifespan_class"):
        assert hasattr(config, name)
    state = ServerState()
    assert (state.tasks, state.connections, state.default_headers) == (set(), set(), [])
    source = inspect.getsource(HttpToolsProtocol) + inspect.getsource(RequestResponseCycle)
    assert not [name for name in ATTRIBUTES if f"self.{name}" not in source]


def test_the_uvicorn_of_these_tests_is_one_that_is_allowed() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [bound] = [found for one in project["dependencies"] if (found := Requirement(one)).name == "uvicorn"]
    assert bound.specifier.contains(version("uvicorn"))
    assert any(one.operator == "<" for one in bound.specifier), "what is inside may change with any release"
