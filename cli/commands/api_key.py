"""`meshctl keys api`: a new API key for a client, which is shown once and stored nowhere."""

import os
import sys
from pathlib import Path

from cli.errors import BadKeys, WrongUsage
from cli.exit_codes import ExitCode
from cli.output import print_json
from nodes.api_keys.entries import ApiKey, BadApiKeys, check_name, new_key, sha256_of
from nodes.api_keys.file import read_key_file


def new(
    name: str, file: Path | None, requests: int, tokens: int, output: str, *, admin: bool = False, weight: int = 1
) -> ExitCode:
    """Print a key, and the line that lets it in; with `file`, add the line there. Raises WrongUsage, BadKeys."""
    try:
        check_name(name)
    except BadApiKeys as error:
        raise WrongUsage(f"{name!r} cannot be the name of a key", why=error.message, do="choose another") from error
    secret = new_key()
    line = ApiKey(name, sha256_of(secret), requests, tokens, admin, weight).line()
    if file is not None:
        _add(file, name, line)
    if output == "json":
        print_json({"name": name, "key": secret, "line": line})
    else:
        sys.stdout.write(f"{secret}\n")
    if file is None:
        sys.stderr.write(f"the key is shown only now; its line for --api-key-file:\n{line}\n")
    else:
        sys.stderr.write(f"the key is shown only now; its hash is in {file}, which gateways read within a second\n")
    return ExitCode.OK


def _add(file: Path, name: str, line: str) -> None:
    try:
        there = read_key_file(file) if file.exists() and file.stat().st_size else ()
        if any(key.name == name for key in there):
            raise BadKeys(f"{file} has a key {name} already", why="names are told apart", do="choose another name")
        with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+") as opened:
            text = opened.read()
            # The last line of a file that was edited may not end.
            opened.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    except BadApiKeys as error:
        raise BadKeys(f"no key can be added to {file}", why=error.message, do="correct it first") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise BadKeys(f"no key can be added to {file}", why=why, do="give a file that can be written") from error
