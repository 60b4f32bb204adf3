"""Errors of commands: what they say is wrong, why, and what to do."""

import contextlib
from collections.abc import Iterator

import pytest

from cli.errors import CliError

Parts = str | tuple[str, ...]


@contextlib.contextmanager
def refused(kind: type[CliError], what: str | None = None, *, why: Parts = "", do: Parts = "") -> Iterator[None]:
    """What is done here ends so. `what` is a pattern of the whole text; `why` and `do` are parts of those two lines."""
    with pytest.raises(kind, match=what) as caught:
        yield
    for said, parts in ((caught.value.why, why), (caught.value.do, do)):
        assert said
        for part in (parts,) if isinstance(parts, str) else parts:
            assert part in said
