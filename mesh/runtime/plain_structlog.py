"""structlog without rich, which it imports for coloured tracebacks wherever rich is installed.

Ours go to log files, as JSON. Rich and what it brings along are 66 modules and 4 to 7 MiB: 3.9 MiB of a supervisor, and
0.8 MiB of each actor that is forked from a zygote which has them. Whoever needs rich for tables imports it as ever.
"""

import sys

_RICH = "rich"
_is_new = _RICH not in sys.modules
if _is_new:
    # What the import system takes for a module that there is not.
    sys.modules[_RICH] = None  # type: ignore[assignment]
try:
    import structlog
finally:
    if _is_new:
        del sys.modules[_RICH]

__all__ = ["structlog"]
