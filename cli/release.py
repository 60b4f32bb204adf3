"""Which release of kvmesh this is. Hosts of one mesh run the same."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """Its version, like 1.2.0."""
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        # A checkout that was never installed.
        return "0+unknown"
