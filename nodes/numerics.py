"""Which worker groups compute the same bits, and which are slower than they could be, by what they announce. Pure.

Groups of one mesh may run on unequal machines. A request that moves to a group of other numerics continues with other
bits: its text is as good, but not the text that it would have had.
"""

from collections.abc import Iterable

from mesh.membership.view import Member
from nodes.roles import SCHEDULER, WORKER


def scheduler_numerics(members: Iterable[Member]) -> dict[str, str]:
    """Fingerprints of the schedulers that announce one, in whatever state, by actor id."""
    return {one.actor_id: numerics for one in members if one.role == SCHEDULER and (numerics := _text(one, "numerics"))}


def is_same_bits(numerics: str) -> bool:
    """Whether a worker of this fingerprint computes a row to the same bits, whatever is computed with it."""
    return "varies" not in numerics.split("/")


def numerics_note(members: Iterable[Member]) -> str:
    """A line for people if groups announce unequal numerics; else empty."""
    groups: dict[str, set[str]] = {}
    for member in members:
        if member.role == SCHEDULER and (numerics := _text(member, "numerics")):
            groups.setdefault(numerics, set()).add(_text(member, "group") or member.actor_id)
    if len(groups) < 2:
        return ""
    sets = sorted((sorted(names), numerics) for numerics, names in groups.items())
    texts = [f"{', '.join(names)} ({numerics})" for names, numerics in sets]
    return f"worker groups compute with different numerics, so their results are not bit-identical: {'; '.join(texts)}"


def kernels_note(members: Iterable[Member]) -> str:
    """Why workers use slower kernels than they could, each reason once; else empty."""
    notes = {_text(member, "kernels") for member in members if member.role == WORKER}
    return "; ".join(sorted(notes - {""}))


def quantization_note(members: Iterable[Member]) -> str:
    """A line for people if workers compute with rounded weights, naming the format; else empty."""
    found = {_text(member, "quantization") for member in members if member.role == WORKER} - {"", "none"}
    return f"weights are {' and '.join(sorted(found))}, rounded when they were loaded" if found else ""


def _text(member: Member, name: str) -> str:
    value = member.attributes.get(name)
    return value if isinstance(value, str) else ""
