"""Hosts of a mesh in network namespaces of their own, joined by a bridge whose links can be cut.

Needs root and iproute2.

    head: br0 10.99.0.1 --- eth0 10.99.0.2 (the second host), eth0 10.99.0.3 (the third), ...

Nothing of it is seen outside: the namespaces live as long as a process in each, and have no names.
"""

import contextlib
import os
import shutil
import subprocess

from tests.process.conftest import Host

MISSING = [tool for tool in ("ip", "bridge", "unshare", "nsenter") if not shutil.which(tool)]
REASON = "needs root and iproute2, for network namespaces"
POSSIBLE = os.geteuid() == 0 and not MISSING and not subprocess.run(["unshare", "-n", "true"], check=False).returncode


class Net:
    """So many namespaces; the first one's bridge joins them."""

    def __init__(self, number):
        self._keepers = [
            subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
            for _ in range(number)
        ]
        for keeper in self._keepers:
            # It says a line once it is in a namespace of its own.
            keeper.stdout.readline()
            keeper.stdout.close()
        for index, keeper in enumerate(self._keepers):
            self.run(index, "ip", "link", "set", "lo", "up")
            if index == 0:
                self.run(0, "ip", "link", "add", "br0", "type", "bridge")
                self.run(0, "ip", "addr", "add", f"{self.address(0)}/24", "dev", "br0")
                self.run(0, "ip", "link", "set", "br0", "up")
                continue
            port = f"port{index}"
            self.run(0, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
            self.run(0, "ip", "link", "set", port, "master", "br0", "up")
            self.run(index, "ip", "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            self.run(index, "ip", "link", "set", "eth0", "up")

    @staticmethod
    def address(index):
        return f"10.99.0.{index + 1}"

    def inside(self, index, command):
        """The command as one that runs in a namespace."""
        return ["nsenter", "--target", str(self._keepers[index].pid), "--net", *command]

    def run(self, index, *command):
        done = subprocess.run(self.inside(index, command), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def cut(self, *indices):
        """No frame passes between these (not the first one) meanwhile; with the others they talk on."""
        for state in ("on", "off"):
            for index in indices:
                # Isolated ports of a bridge hear only those that are not: silence, as of a broken cable, no refusal.
                self.run(0, "bridge", "link", "set", "dev", f"port{index}", "isolated", state)
            if state == "on":
                yield

    def close(self):
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()


class NetHost(Host):
    """A host in one of the namespaces. Its commands find their supervisor from outside, by its socket's path."""

    def __init__(self, base, net, index):
        super().__init__(base)
        self._net, self._index = net, index

    def command(self, *arguments, name=True):
        command = super().command(*arguments, name=name)
        return self._net.inside(self._index, command) if arguments[0] == "up" else command

    def ask(self, text, **options):
        """What the mesh answers to one message, asked from inside."""
        arguments = [
            word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", str(value))
        ]
        command = super().command("chat", text, *arguments)
        done = subprocess.run(
            self._net.inside(self._index, command), capture_output=True, text=True, timeout=60, env=self.environment,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout
