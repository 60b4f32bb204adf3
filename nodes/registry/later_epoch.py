"""Whether this registry incarnation has to end because peers know a later one. Pure.

It has to if its host lost its files and its clock is behind: actors that knew the previous registry would dial that one
forever. But one host alone, broken or hostile, must not end a registry that the others have joined. So other hosts are
counted: after one lease, which gives all of them time to join, the hosts that know a later epoch have to outnumber the
other hosts that have joined. An actor of the registry's own host is believed at once.
"""

from collections.abc import Iterable

from mesh.address import MAX_HEARD_EPOCH, host_of

_MAX_VOICES = 4096
"""As many as there may be hosts (`MAX_HOSTS`); without keys a stranger could name any number."""


class LaterEpoch:
    """Which other hosts say that one registry incarnation, begun at `now`, is over; times are seconds on one clock."""

    def __init__(self, now: float, wait_s: float) -> None:
        self._counts_from = now + wait_s
        self._voices: set[str] = set()

    def is_believed(self, epoch: int, by: str, own_host: str, joined: Iterable[str], now: float) -> bool:
        """Whether this incarnation is over, given that `by` knows a later `epoch`; `joined` are its members' ids."""
        if epoch > MAX_HEARD_EPOCH:
            return False
        host = host_of(by)
        if host in ("", own_host):
            return True
        if len(self._voices) < _MAX_VOICES:
            self._voices.add(host)
        others = {host_of(actor_id) for actor_id in joined} - self._voices - {"", own_host}
        return now >= self._counts_from and len(self._voices) > len(others)
