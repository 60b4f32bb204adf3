"""`meshctl version`."""

import platform
import sys

from cli.exit_codes import ExitCode
from cli.output import print_json
from cli.release import release
from mesh.wire.header import PROTOCOL_VERSION


def version(output: str) -> ExitCode:
    """Print what is installed."""
    kvmesh = release()
    python = platform.python_version()
    if output == "json":
        print_json({"kvmesh": kvmesh, "protocol": PROTOCOL_VERSION, "python": python})
    else:
        sys.stdout.write(f"meshctl {kvmesh} (protocol {PROTOCOL_VERSION}, Python {python})\n")
    return ExitCode.OK
