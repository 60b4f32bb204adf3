"""Pages on disk, by processes: what one mesh has stored is there for the next, and outlives the agent's death."""

import json
import os
import re
import shutil
import signal
import urllib.request
from functools import partial

import pytest

from nodes.model_spec.resolve import BUNDLED_DIRECTORY
from nodes.model_spec.weight_index import read_header
from tests.process.topologies import SERVING, write_topology

pytestmark = [pytest.mark.process]

TINY = BUNDLED_DIRECTORY / "tiny"
TEXT = "what is said here fills some pages of sixteen tokens each, and then some more of them. "


def figure(host, name):
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", host.metrics(), re.MULTILINE)
    return float(found[1]) if found else -1.0


def answer_to(host, prompt, model="tiny", **fields):
    """The choice, and how many of the prompt's tokens were cached."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{host.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def complete(host, prompt):
    """The text, and how many of the prompt's tokens were cached."""
    choice, cached = answer_to(host, prompt)
    return choice["text"], cached


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_was_stored_is_restored_after_a_restart(host, ranks):
    disk = host.base / "disk"
    disk.mkdir(0o700)
    sizes = ("--prefill", "1", "--decode", "1", "--tp", str(ranks))
    options = ("--model", "tiny", *sizes, "--kv-disk", str(disk), "--kv-disk-size", "20MiB")
    prompts = [f"{subject} has 7 green pears. " * 30 for subject in ("Ann", "Bob", "Eve", "Ted")]
    mesh = host.up(*options)
    texts = [complete(host, prompt)[0] for prompt in prompts]
    host.ends_well(mesh)
    mesh = host.up(*options)
    again = [complete(host, prompt) for prompt in prompts]
    assert [text for text, _ in again] == texts
    # On a busy machine an answer of the agent may come too late for one of them, which is then computed.
    assert sum(cached >= 160 for _, cached in again) >= 2
    restored = sum(
        int(float(one)) for one in re.findall(r"^mesh_scheduler_restored_pages_total{.*} (\S+)$", host.metrics(), re.M)
    )
    assert restored >= 2 * 10
    host.ends_well(mesh)


# Which weights make which names and keys is for `tests/nodes/test_fingerprint.py`, in CI; here three meshes start.
@pytest.mark.slow
def test_pages_of_other_weights_are_not_found(host):
    """One number of the last layer is another one: what comes before it computes alike."""
    disk, folder = host.base / "disk", host.base / "model"
    disk.mkdir(0o700)
    file = shutil.copytree(TINY, folder) / "model.safetensors"
    options = ("--model", str(folder), "--mixed", "1")
    stored = (*options, "--kv-disk", str(disk), "--kv-disk-size", "20MiB")
    prompts = [f"{subject} has 7 green pears. " * 30 for subject in ("Ann", "Bob", "Eve", "Ted")]
    mesh = host.up(*stored)
    for prompt in prompts:
        answer_to(host, prompt, "model")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= 4 * 10, "the prompts are stored")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_queued_pages") == 0, "nothing waits")
    host.ends_well(mesh)
    entries = read_header(file)
    last = max(int(name.split(".")[2]) for name in entries if ".layers." in name)
    begin, _ = entries[f"model.layers.{last}.self_attn.v_proj.weight"].data_offsets
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - max(entry.data_offsets[1] for entry in entries.values()) + begin)
        opened.write(b"\x00\x40")  # 2.0, in bfloat16

    def answers(*options):
        mesh = host.up(*options)
        found = [answer_to(host, prompt, "model", logprobs=3) for prompt in prompts]
        host.ends_well(mesh)
        return found

    beside = answers(*stored)
    assert [cached for _, cached in beside] == [0] * len(prompts)
    assert beside == answers(*options), "as without the disk"


@pytest.mark.slow
def test_what_was_stored_is_there_after_a_death_and_a_restart(host):
    disk = host.base / "disk"
    disk.mkdir(0o700)
    options = ("--model", "echo", "--mixed", "1", "--kv-disk", str(disk), "--kv-disk-size", "4MiB")
    mesh = host.up(*options)
    assert figure(host, "mesh_kv_disk_pages") == 0
    host.say(TEXT)
    # As many as are full: how many that are is the model's affair.
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= 4, "the first text is stored")
    before = figure(host, "mesh_kv_disk_pages")
    agent = host.pids()["kv-agent-0"]
    os.kill(agent, signal.SIGKILL)
    host.wait_until(lambda: host.pids()["kv-agent-0"] != agent, "another agent")

    def stores_again():
        host.say(f"{os.urandom(4).hex()} {TEXT}")
        return figure(host, "mesh_kv_disk_pages") > before

    # It opens the store when it is told of pages, and those are dropped that come before it is open.
    host.wait_until(stores_again, "the next agent stores, too")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_queued_pages") == 0, "nothing waits")
    before = figure(host, "mesh_kv_disk_pages")
    host.ends_well(mesh)
    mesh = host.up(*options)
    # Which pages there are is read after the store is open, while the mesh serves.
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= before, "the pages are found")
    host.ends_well(mesh)


@pytest.mark.slow
def test_kv_says_what_is_on_disk_and_why_pages_were_computed(host):
    disk = host.base / "disk"
    disk.mkdir(0o700)
    options = ("--model", "tiny", "--mixed", "1", "--kv-disk", str(disk), "--kv-disk-size", "16MiB")
    mesh = host.up(*options)
    prompts = [f"{name} {TEXT * 6}" for name in ("one", "two", "three", "four", "five", "six")]
    ask = partial(host.say, model="tiny", max_tokens=1)

    def look(*command):
        told = host.meshctl("kv", *command, "-o", "json")
        assert told.stderr == ""
        return json.loads(told.stdout)

    def why():
        """The runs of the last call's prompt, and their pages together."""
        (fate,) = look("why")
        runs = [(run["why"], run["num"]) for run in fate["runs"]]
        return dict(runs), sum(num for _, num in runs)

    for prompt in prompts:
        ask(prompt)
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= 6 * 10, "the prompts are stored")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_queued_pages") == 0, "nothing waits")
    ask(prompts[-1])
    runs, num_pages = why()
    assert runs == {"cached": num_pages}
    assert f"pages at scheduler-mixed-0: {num_pages} cached" in host.meshctl("trace").stdout
    host.ends_well(mesh)
    mesh = host.up(*options)
    # A supervisor hears of its mesh's members a moment later than it is asked.
    host.wait_until(lambda: host.meshctl("kv", "ls").returncode == 0, "the agent answers")
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= 6 * 10, "the pages are found")
    (store,) = look("ls")
    assert (store["is_open"], store["groups"], store["agent"]) == (True, ["mixed-0"], "kv-agent-0")
    assert store["folder"] in host.meshctl("kv", "ls").stdout
    restored = 0
    for prompt in prompts:
        ask(prompt)
        runs, _ = why()
        # On a busy machine the agent's answer may be late, and reading may take longer than computing.
        assert runs.keys() <= {"cached", "restored", "late", "dearer", "short"}, runs
        restored += runs.get("restored", 0)
    assert restored > 0, "nothing was read in six times"
    assert figure(host, "mesh_scheduler_restored_pages_total") == restored
    assert figure(host, "vllm:external_prefix_cache_hits_total") == 16 * restored
    stats = look("stats")
    assert stats["readers"][0]["num_restored"] == restored
    assert f"{restored:,}" in host.meshctl("kv", "stats").stdout
    refused = host.meshctl("kv", "flush")
    assert (refused.returncode, "without being told" in refused.stderr) == (2, True)
    flushed = host.meshctl("kv", "flush", "--yes").stdout
    assert flushed.startswith(f"kv-agent-0 has forgotten {store['num_pages']:,} pages of {store['folder']}")
    host.ends_well(mesh)
    mesh = host.up(*options)
    host.wait_until(lambda: host.meshctl("kv", "ls").returncode == 0, "the agent answers")
    host.wait_until(lambda: look("ls")[0]["is_loaded"], "it is read")
    assert figure(host, "mesh_kv_disk_pages") == 0
    ask(prompts[0])
    runs, num_pages = why()
    assert sum(runs.get(reason, 0) for reason in ("never_stored", "late")) == num_pages
    host.ends_well(mesh)


@pytest.mark.slow
def test_after_all_hosts_have_started_again_a_prompt_goes_to_the_host_that_has_its_pages(host, another_host):
    """Each host has a disk of its own. Without a word of what is on it, half of these would go to the other one."""
    hosts = {"head": host, "two": another_host()}
    file = host.base / "mesh.toml"
    sizes = {"head": {**SERVING, "mixed": 1}, "two": {"mixed": 1}}
    write_topology(file, host.port, sizes, model="tiny")
    prompts = [f"{subject} has 7 green pears. " * 30 for subject in ("Ann", "Bob", "Eve", "Ted", "Ida", "Max")]

    def start():
        meshes = []
        for name, one in hosts.items():
            disk = one.base / "disk"
            disk.mkdir(0o700, exist_ok=True)
            options = ("-f", str(file), "--host", name, "--kv-disk", str(disk), "--kv-disk-size", "20MiB")
            meshes.append(one.up(*options, wait=False))
        host.wait_ready(meshes[0])

        def serve():
            ready = [
                entry for entry in host.ps().values() if entry["role"] == "scheduler" and entry["state"] == "ready"
            ]
            return len(ready) == 2

        host.wait_until(serve, "both hosts serve")
        return meshes

    def stop(meshes):
        for mesh in reversed(meshes):
            mesh.terminate()
            mesh.wait(60)

    def stored():
        return [int(float(one)) for one in re.findall(r"^mesh_kv_disk_pages{.*} (\S+)$", host.metrics(), re.M)]

    def indexed():
        return [
            int(float(one)) for one in re.findall(r"^mesh_tokenizer_indexed_pages{.*} (\S+)$", host.metrics(), re.M)
        ]

    meshes = start()
    texts = [complete(host, prompt)[0] for prompt in prompts]
    host.wait_until(lambda: sum(stored()) >= 10 * len(prompts), "all are stored")
    stop(meshes)
    meshes = start()
    host.wait_until(lambda: sum(indexed()) >= 10 * len(prompts), "the tokenizer knows what is on both disks")
    again = [complete(host, prompt) for prompt in prompts]
    assert [text for text, _ in again] == texts
    assert sum(cached >= 160 for _, cached in again) >= len(prompts) - 1
    stop(meshes)
