"""Amounts of memory as people say them."""


def amount(num_bytes: float) -> str:
    """`96.0 KiB`, `512.0 MiB`, `1.5 GiB`: as people say it."""
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"
