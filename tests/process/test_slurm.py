"""A mesh of three hosts as a job of Slurm's, on three nodes that are daemons on this machine, cancelled under streams.

Skipped without Debian's `slurm-wlm` and `munge`, and for any user but root, as whom alone `slurmd` runs.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

from mesh.testing.ports import free_port
from tests.process.conftest import wait_until
from tests.process.test_job_ends import NUM_TOKENS, ended, streams_of
from tests.process.topologies import SERVING, write_topology

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue")
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)), reason="needs root, Slurm and munge"),
]
HOSTS = {"head": SERVING, "p": {"prefill": 1}, "d": {"decode": 1}}
KILL_WAIT_S = 30


class Slurm:
    """A controller and a node for each host, all on loopback."""

    def __init__(self, base):
        self.base = base
        self.environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        self.daemons = []
        for name in ("state", *(f"spool.{host}" for host in HOSTS)):
            (base / name).mkdir()
        name = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={host} NodeHostname={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
            for host in HOSTS
        )
        (base / "slurm.conf").write_text(
            textwrap.dedent(
                f"""
                ClusterName=kvmesh
                SlurmctldHost={name}(127.0.0.1)
                SlurmctldPort={free_port()}
                SlurmUser=root
                AuthType=auth/munge
                AuthInfo=socket={base}/munge.sock
                StateSaveLocation={base}/state
                SlurmdSpoolDir={base}/spool.%n
                SlurmctldPidFile={base}/slurmctld.pid
                SlurmdPidFile={base}/slurmd.%n.pid
                ProctrackType=proctrack/linuxproc
                TaskPlugin=task/none
                SelectType=select/cons_tres
                SelectTypeParameters=CR_Core
                MpiDefault=none
                ReturnToService=2
                KillWait={KILL_WAIT_S}
                """
            )
            + f"{nodes}\nPartitionName=main Nodes={','.join(HOSTS)} Default=YES MaxTime=INFINITE State=UP\n"
        )
        key = base / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        own = [f"--{what}={base}/munge.{what[:3]}" for what in ("pid-file", "log-file", "seed-file")]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={base}/munge.sock", *own)
        wait_until((base / "munge.sock").exists, "munged listens")
        self._start("slurmctld", "-D")
        for host in HOSTS:
            self._start("slurmd", "-D", "-N", host)

    def _start(self, program, *arguments):
        with (self.base / f"{program}.log").open("ab") as log:
            command = [program, *arguments]
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment))

    def run(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def until_over(self, number):
        wait_until(lambda: number not in self.run("squeue", "-h", "-o", "%i").split(), "the job is over")

    def close(self):
        # They would wait for jobs that a test has failed to end.
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()


@pytest.fixture
def slurm():
    base = Path(tempfile.mkdtemp(prefix="ks"))
    # munged asks that others cannot write there, and slurmd that its user's jobs can go there.
    base.chmod(0o755)
    slurm = Slurm(base)
    try:
        yield slurm
    finally:
        slurm.close()
        shutil.rmtree(base)


def test_streams_are_finished_when_the_job_is_cancelled(slurm, host):
    file = host.base / "mesh.toml"
    write_topology(
        file, host.port, HOSTS, model="echo?step_ms=5", local_prefill_max=0,
        **{"supervision.drain_timeout_s": KILL_WAIT_S - 10},
    )  # fmt: skip
    for name in HOSTS:
        (host.base / name).mkdir(mode=0o700)
    task = host.base / "task.sh"
    up = " ".join(host.command("up", "-f", str(file), "--host", "$HOST"))
    lines = [f"HOSTS=({' '.join(HOSTS)})", "HOST=${HOSTS[$SLURM_PROCID]}"]
    lines += [f"export XDG_RUNTIME_DIR={host.base}/$HOST XDG_CONFIG_HOME={host.base}", f"exec {up}"]
    task.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    task.chmod(0o755)
    job, output = host.base / "job.sh", host.base / "out"
    job.write_text(f"#!/bin/bash\nexec srun --kill-on-bad-exit=0 --label {task}\n")
    wait_until(lambda: slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D") == "3", "all nodes are there")
    number = slurm.run("sbatch", "--parsable", "--nodes=3", "--ntasks-per-node=1", f"--output={output}", str(job))
    try:
        host.wait_ready()
        streams = streams_of(host, "echo")
        slurm.run("scancel", number)
        for stream in ended(streams):
            assert (stream.finish, stream.usage["completion_tokens"], stream.error) == ("length", NUM_TOKENS, None)
        slurm.until_over(number)
    finally:
        # It is over, or the test has failed.
        with contextlib.suppress(AssertionError):
            slurm.run("scancel", "--signal=KILL", "--full", number)
            slurm.until_over(number)
    text = output.read_text()
    assert text.count(" stopped\n") == len(HOSTS), text
    assert not [path.name for path in Path("/dev/shm").glob(f"*{host.name}*")]
