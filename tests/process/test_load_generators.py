"""guidellm and aiperf by their defaults against a mesh: they probe, count and stream in ways that no client does.

Each in a virtual environment of its own (a GB each, minutes), because they pin what this project pins otherwise.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "nodes" / "bundled" / "tiny"


def installed(folder, *packages):
    """The `bin` of an environment that has them. torch as pinned here: its newest brings gigabytes of CUDA."""
    (torch,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    constraints = folder / "constraints.txt"
    constraints.write_text(torch + "\n")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    bin_folder = folder / "venv" / "bin"
    install = [bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", constraints, *packages]
    done = subprocess.run([str(word) for word in install], capture_output=True, text=True, timeout=3000, check=False)
    if done.returncode:
        pytest.skip(f"{packages} cannot be installed here: {done.stderr[-300:]}")
    return bin_folder


def run(host, folder, *command):
    environment = {**host.environment, "HOME": str(folder)}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])


def test_guidellm(host, tmp_path):
    tools = installed(tmp_path, "torch", "guidellm>=0.8,<0.9")
    host.up("--model", "tiny", "--mixed", "1")
    run(
        host, tmp_path, tools / "guidellm", "run",
        "--backend", f"kind=openai_http,target={host.url}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_aiperf(host, tmp_path):
    tools = installed(tmp_path, "aiperf>=0.13,<0.14")
    host.up("--model", "tiny", "--mixed", "1")
    run(
        host, tmp_path, tools / "aiperf", "profile", "--model", "tiny", "--url", host.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", TOKENIZER, "--request-count", "4", "--synthetic-input-tokens-mean", "32",
        "--output-tokens-mean", "16", "--ui", "simple",
    )  # fmt: skip
    (report,) = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    told = json.loads(report.read_text())
    assert told["request_count"]["avg"] == 4
    assert told["time_to_first_token"]["avg"] > 0
