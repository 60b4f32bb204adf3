"""Amounts of memory in words, in binary units."""


def amount(num_bytes: float) -> str:
    """`96.0 KiB`, `512.0 MiB`, `1.5 GiB`: in the unit that keeps the number below 1024."""
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"
