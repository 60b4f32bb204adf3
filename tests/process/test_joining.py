"""A host that no file knew joins by a token while streams run, and is drained away again."""

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest

from cli.exit_codes import ExitCode
from tests.process.topologies import SERVING, write_topology

pytestmark = pytest.mark.process

NUM_STREAMS = 6
# It says what its pages hold, in time that is waited for: six streams of `tiny` took the cores that hosts start on.
MODEL = "echo?step_ms=5"


def test_a_host_joins_by_a_token_and_is_drained_away_under_streams(host, another_host):
    head, d, e = host, another_host(), another_host()
    hosts = (("head", head), ("d", d))
    file = head.base / "mesh.toml"
    registry_port = write_topology(file, head.port, {"head": SERVING, "d": {"decode": 1}}, model=MODEL)
    keys = {name: one.meshctl("keys", "new", "-f", str(file), "--host", name).stdout.strip() for name, one in hosts}
    for one, arguments in ((head, ("d", keys["d"])), (d, ("head", keys["head"], "--roles", "registry"))):
        added = one.meshctl("keys", "add", "-f", str(file), *arguments)
        assert added.returncode == ExitCode.OK, added.stderr
    d.up("-f", str(file), "--host", "d", wait=False)
    head.up("-f", str(file), "--host", "head")
    token = head.meshctl("keys", "token").stdout.strip()

    def say(number):
        return head.say(f"{number} Tell a story of that.", max_tokens=200, ignore_eos=True)

    expected = [say(number) for number in range(NUM_STREAMS)]

    join = ("--join", token, "--decode", "1", "--host", "e", "--address", "127.0.0.3")
    stranger = e.meshctl("up", *join)
    assert stranger.returncode == ExitCode.BAD_CONFIG, stranger.stderr
    add = shlex.split(stranger.stderr.partition("on host head: `meshctl ")[2].partition("`")[0])
    assert add[:3] == ["keys", "add", "e"], stranger.stderr
    # As the operations say for a host that runs some roles only.
    added = head.meshctl(*add, "--roles", "worker,scheduler,kv_agent,supervisor", name=False)
    assert added.returncode == ExitCode.OK, added.stderr

    is_done = False

    def keep_saying(number):
        texts = [say(number)]
        while not is_done:
            texts.append(say(number))
        return set(texts)

    with ThreadPoolExecutor(NUM_STREAMS) as streams:
        said = [streams.submit(keep_saying, number) for number in range(NUM_STREAMS)]
        try:
            joined = e.up(*join, wait=False)
            e.wait_until(lambda: "is ready in" in joined.log.read_text() or joined.poll() is not None, "e has joined")
            assert joined.poll() is None, joined.log.read_text()
            head.wait_until(lambda: head.ps()["scheduler-decode-0.e"]["num_running"], "streams run on e")
            listed = head.ps()
            assert (listed["worker-decode-0.e"]["host"], listed["worker-decode-0.e"]["state"]) == ("e", "ready")
            down = head.meshctl("down", "--host", "e")
            assert down.returncode == ExitCode.OK, down.stderr
            assert joined.wait() == ExitCode.OK, joined.log.read_text()
        finally:
            is_done = True
        assert [future.result() for future in said] == [{text} for text in expected]
    assert not any(".e" in actor_id for actor_id in head.ps())
    unknown = head.meshctl("down", "--host", "e")
    assert (unknown.returncode, "host e is not in the mesh; its hosts are d, head" in unknown.stderr) == (
        ExitCode.USAGE,
        True,
    )

    # Revoked while it runs, without a word to anybody: it is out, and its supervisor still answers at home.
    revoked = head.meshctl("keys", "revoke", "d")
    assert revoked.returncode == ExitCode.OK, revoked.stderr
    head.wait_until(lambda: not any(actor_id.endswith(".d") for actor_id in head.ps()), "d is out")
    cut_off = d.ps()
    assert cut_off["worker-decode-0.d"]["state"] == "ready"
    assert cut_off["gateway-0.head"]["state"] == "unknown"

    def says_why():
        notes = d.ps()["supervisor.d"]["mesh_notes"]
        return any(f":{registry_port}: " in note and "meshctl keys add d" in note for note in notes)

    d.wait_until(says_why, "d says why")
    drained = d.meshctl("drain", "worker-decode-0.d")
    assert drained.returncode == ExitCode.NOT_RUNNING, drained.stderr
    ended = d.meshctl("down")
    assert ended.returncode == ExitCode.OK, ended.stderr
    assert "host head was not reached: if it is running, stop it there" in ended.stderr
    assert head.ps()["gateway-0.head"]["state"] == "ready"
