"""Which release of kvmesh this is. All hosts of a mesh run the same one."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The version of kvmesh, like 1.2.0."""
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        # A checkout that was never installed.
        return "0+unknown"
