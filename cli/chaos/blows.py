"""Which blows fall on whom: drawn by a seed, so that a storm can be had again. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from cli.errors import WrongUsage
from nodes.roles import GATEWAY, SUPERVISOR

Kind = Literal["kill", "stop", "garbage", "slow"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
HTTP: Final = "http"
"""The port of the gateways, as the target of a blow."""

_SPARED: Final = (GATEWAY, SUPERVISOR)
"""A gateway takes the streams with it that it serves, a supervisor the mesh: neither is promised to go unnoticed."""
_SIGNALS: Final[tuple[Kind, ...]] = ("kill", "stop")
_STOP_S: Final = (0.3, 4.0)
"""On both sides of 2.5 s, after which a supervisor kills; those that wake up just then are suspected already."""
_SLOW_S: Final = (1.0, 5.0)
"""Longer than heartbeats are missed for, shorter than storms pause."""


@dataclass(frozen=True)
class Blow:
    """One blow to an actor, or to HTTP. `lasts_s` of one that is stopped or read slowly; `seed` of what is sent."""

    kind: Kind
    target: str
    lasts_s: float = 0.0
    seed: int = 0


class NoTarget(ValueError):
    """The kinds of blows and the actors that were asked for leave nobody to strike; the text says why."""


class Blows:
    """An endless series, the same for the same seed, kinds and actors.

    `actors` are this host's, role by id; of these `only` those of the named ids and roles, if any is named. Without it
    gateways and supervisor are not signalled: they and their HTTP port get garbage and slow readers all the same.
    Raises NoTarget.
    """

    def __init__(self, seed: int, kinds: Sequence[Kind], actors: Mapping[str, str], only: Sequence[str] = ()) -> None:
        self._draw = random.Random(seed)
        known = {*actors, *actors.values()}
        if missing := [name for name in only if name not in known]:
            raise NoTarget(f"this host has no {', '.join(missing)}: it has {', '.join(sorted(known))}")
        chosen = {id_: role for id_, role in actors.items() if not only or {id_, role} & {*only}}
        signalled = {id_: role for id_, role in chosen.items() if role != SUPERVISOR and (only or role not in _SPARED)}
        port = {HTTP: HTTP} if GATEWAY in chosen.values() else {}
        targets: dict[Kind, dict[str, str]] = {
            "kill": signalled, "stop": signalled, "garbage": chosen | port, "slow": port
        }  # fmt: skip
        self._targets: dict[Kind, list[list[str]]] = {
            kind: _by_role(targets[kind]) for kind in KINDS if kind in kinds and targets[kind]
        }
        if not self._targets:
            raise NoTarget(
                f"{', '.join(kinds)} cannot be dealt to {', '.join(only) or 'anybody here'}: a supervisor's end would "
                "be the mesh's, and slow readers read from gateways"
            )

    @property
    def signalled(self) -> list[str]:
        """Ids of the actors that may be killed or stopped."""
        return sorted({id_ for kind in _SIGNALS for ids in self._targets.get(kind, []) for id_ in ids})

    def next(self) -> Blow:
        """Each kind as often as the others, and of each kind each role: a mesh has many workers and one registry."""
        kinds: list[Kind] = [*self._targets]
        kind = self._draw.choice(kinds)
        target = self._draw.choice(self._draw.choice(self._targets[kind]))
        low, high = _STOP_S if kind == "stop" else _SLOW_S
        lasts_s = round(self._draw.uniform(low, high), 2) if kind in ("stop", "slow") else 0.0
        return Blow(kind, target, lasts_s, self._draw.getrandbits(32))


def kinds_in(text: str) -> list[Kind]:
    """The kinds that a list with commas names. Raises WrongUsage."""
    words = [word for word in text.split(",") if word]
    if strangers := [word for word in words if word not in KINDS] or ([] if words else [text]):
        why, do = f"blows are {', '.join(KINDS)}", "name some of these, with commas"
        raise WrongUsage(f"{', '.join(map(repr, strangers))} is no kind of blow", why=why, do=do)
    return [kind for kind in KINDS if kind in words]


def _by_role(actors: Mapping[str, str]) -> list[list[str]]:
    roles = sorted({*actors.values()})
    return [sorted(id_ for id_, role in actors.items() if role == one) for one in roles]


def garbage(seed: int, *, http: bool) -> bytes:
    """Bytes that mean nothing, or almost something, to whoever listens for HTTP or ZMTP."""
    draw = random.Random(seed)
    noise = draw.randbytes(draw.randint(1, 1 << draw.randint(1, 16)))
    kinds = _HTTP_GARBAGE if http else _ZMTP_GARBAGE
    # What one side speaks is garbage to the other.
    begin = draw.choice([*kinds, *(() if http else _HTTP_GARBAGE[:1]), b""])
    return begin + noise


_POST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_HTTP_GARBAGE: Final = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    _POST + b"Content-Length: 18446744073709551616\r\n\r\n",
    _POST + b"Content-Length: 5000\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    _POST + b"X: ",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
"""Whole, too long, shorter than it says, chunks without end, a header without one, and the begin of TLS."""
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_ZMTP_GARBAGE: Final = (
    _GREETING[:20],
    _GREETING,
    _GREETING + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER",
    _GREETING + b"\x06" + b"\xff" * 8,
)
"""Half a greeting, all of it, a handshake that breaks off, a command of 2^64 bytes."""
