"""`meshctl version`."""

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from cli.exit_codes import ExitCode
from cli.output import print_json
from mesh.wire.header import PROTOCOL_VERSION


def version(output: str) -> ExitCode:
    """Print what is installed."""
    try:
        kvmesh = installed_version("kvmesh")
    except PackageNotFoundError:
        # A checkout that was never installed.
        kvmesh = "0+unknown"
    python = platform.python_version()
    if output == "json":
        print_json({"kvmesh": kvmesh, "protocol": PROTOCOL_VERSION, "python": python})
    else:
        sys.stdout.write(f"meshctl {kvmesh} (protocol {PROTOCOL_VERSION}, Python {python})\n")
    return ExitCode.OK
