"""A conversation over /v1/responses goes on at another host's gateway, and ends where its host is gone."""

import json
import os
import signal
import urllib.error
import urllib.request

import pytest

from tests.process.topologies import SERVING, write_topology

pytestmark = pytest.mark.process


def asked(host, path="", method="POST", **fields):
    """Status and body of the answer."""
    data = json.dumps({"model": "echo", **fields}).encode() if method == "POST" else None
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{host.url}/v1/responses{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_conversation_goes_on_at_another_host(host, another_host):
    head, other = host, another_host()
    file = head.base / "mesh.toml"
    hosts = {"head": {**SERVING, "mixed": 1}, "other": {"gateways": 1}}
    # The bundled one shows the last turn alone.
    template = head.base / "all.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    write_topology(file, head.port, hosts, model="echo", responses_store="1MiB", chat_template=str(template))
    up = other.up("-f", str(file), "--host", "other", wait=False)
    head.up("-f", str(file), "--host", "head")
    other.wait_ready(up)

    last, length = None, 0
    for number, at in enumerate((head, other, other, head, other)):
        status, last = asked(at, input=f"{number}", previous_response_id=last and last["id"], max_output_tokens=8)
        assert status == 200, last
        assert last["usage"]["input_tokens"] > length, "what was said before is part of the prompt"
        length = last["usage"]["input_tokens"]
        assert last["id"].endswith("_other" if at is other else "_head")
    assert asked(head, f"/{last['id']}", "GET") == (200, last)

    # Another gateway of that host has the same file; without its host a response is gone.
    os.kill(other.ps()["gateway-0.other"]["pid"], signal.SIGKILL)
    head.wait_until(lambda: asked(head, f"/{last['id']}", "GET") == (200, last), "its host answers again")
    assert other.meshctl("down", "--host", "other").returncode == 0
    status, refused = asked(head, input="6", previous_response_id=last["id"])
    assert (status, refused["error"]["code"]) == (404, "previous_response_not_found")
    assert asked(head, input="6")[0] == 200
