"""What is said where no call has the name that was given."""

from cli.errors import WrongUsage


def unknown_call(name: str) -> WrongUsage:
    """The error for a call that nobody knows; without a name, for a mesh that has ended none yet."""
    if not name:
        return WrongUsage("no call has ended yet", why="no gateway has one", do="send a request, then ask again")
    return WrongUsage(
        f"no call named {name!r} is known",
        why="no gateway has it among its last 1,000 calls, and no request log has a line of it",
        do="give the id of its answer (the header X-Kvmesh-Request-Id, the field `id`), its X-Request-Id, or its"
        " trace id; calls in a burst are sampled: see `meshctl trace --last 20`",
    )
