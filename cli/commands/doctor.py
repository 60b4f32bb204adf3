"""`meshctl doctor`: whether this machine is fit for a mesh, and what to do where it is not."""

import os
import sys
from pathlib import Path

from cli.commands.up import settings_in_force
from cli.doctor.checks import FAIL, Finding, check
from cli.doctor.machine import look
from cli.exit_codes import ExitCode
from cli.output import print_json


def doctor(file: Path | None, name: str | None, host: str | None, output: str) -> ExitCode:
    """Print all findings; FAILED if one of them keeps a mesh from working. Raises BadConfig."""
    settings = settings_in_force(file, {"name": name, "host": host})
    findings = check(look(settings, os.environ))
    if output == "json":
        print_json([finding._asdict() for finding in findings])
    else:
        sys.stdout.write("".join(_lines(findings)))
    return ExitCode.FAILED if any(finding.state == FAIL for finding in findings) else ExitCode.OK


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines: list[str] = []
    for check_, state, found, do in findings:
        lines.append(f"{state:<4}  {check_:<{width}}  {found}\n")
        if do:
            lines.append(f"{'':<4}  {'':<{width}}  do: {do}\n")
    return lines
