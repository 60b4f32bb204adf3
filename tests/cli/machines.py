"""Machines with keys, each a home directory of its own."""

import json

from typer.testing import CliRunner

from cli import main as command_line
from cli.plan.keys import settle_keys
from cli.plan.sources import load_settings
from mesh.runtime.key_files import KeyDirectory

HOSTS = """
name = "blue"
[hosts.head]
address = "10.0.0.1"
gateways = 1
tokenizers = 1
detokenizers = 1
[hosts.p]
address = "10.0.0.2"
prefill = 1
[hosts.d]
address = "10.0.0.3"
decode = 1
"""


class Machine:
    """A home directory, and the commands that are typed there."""

    def __init__(self, home, monkeypatch):
        self.home = home
        self.monkeypatch = monkeypatch
        self.file = home / "mesh.toml"
        home.mkdir()
        self.file.write_text(HOSTS)

    def keys(self, *arguments):
        """Run `meshctl keys ...`; what it wrote to stdout and stderr. Errors go through."""
        self.monkeypatch.setenv("XDG_CONFIG_HOME", str(self.home))
        result = CliRunner().invoke(command_line.app, ["keys", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    def new(self, *arguments):
        return self.keys("new", *arguments)[0].strip()

    def listed(self, *arguments):
        return json.loads(self.keys("ls", "-o", "json", *arguments)[0])

    def allowed(self, mesh="default"):
        return KeyDirectory(self.home / "kvmesh" / mesh).read_allowed()

    def settled(self, host, **environment):
        settings = load_settings(self.file, environment, {"host": host})
        return settle_keys(settings, {"XDG_CONFIG_HOME": str(self.home)})
