"""Amounts of bytes in words, in decimal units, as disks and model hubs count them."""


def progress_text(done: int, total: int) -> str:
    """`3.1 of 7.6 GB`, both in the total's unit."""
    unit, size = _unit(total)
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


def size_text(num_bytes: int) -> str:
    """`7.6 GB`."""
    unit, size = _unit(num_bytes)
    return f"{num_bytes / size:.1f} {unit}"


def _unit(num_bytes: int) -> tuple[str, int]:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return unit, size
    return "kB", 10**3
