"""A host that the registry does not take in says so, once for each reason, and when it is taken in."""

from types import SimpleNamespace
from typing import Any

from cli.supervisor.told.registry_watch import RegistryWatch
from mesh.address import Address

WAITS = "host p is waiting for the registry at tcp://10.0.0.1:7400"


class Context:
    """Looks when the test says so."""

    def __init__(self) -> None:
        self.address = Address("supervisor.p", 3)
        self.join_trouble = ""
        self.look = lambda: None

    def later(self, _delay_s: float, look: Any) -> None:
        self.look = look


def test_a_trouble_that_lasts_is_said_and_its_end() -> None:
    said: list[str] = []
    working: list[tuple[str, str]] = []
    ctx = Context()
    record = SimpleNamespace(apart=said.append, working=lambda *args: working.append(args))
    watch = RegistryWatch("p", "tcp://10.0.0.1:7400", record)  # type: ignore[arg-type]
    watch.begin(ctx)  # type: ignore[arg-type]

    def looks(trouble: str) -> str:
        ctx.join_trouble = trouble
        ctx.look()
        return watch.trouble

    # One that has failed once is the first of all, or is made again already.
    assert looks("no such epoch") == ""
    assert looks("") == ""
    assert said == []
    assert looks("could not connect") == ""
    assert looks("could not connect") == f"{WAITS}: could not connect"
    assert looks("could not connect") == f"{WAITS}: could not connect"
    assert looks("the key is unknown") == f"{WAITS}: the key is unknown"
    assert looks("") == ""
    assert said == [f"{WAITS}: could not connect", f"{WAITS}: the key is unknown", ""]
    assert working[-3:] == [("supervisor.p", f"{WAITS}: could not connect"), ("supervisor.p", said[1]),
                            ("supervisor.p", "")]  # fmt: skip
