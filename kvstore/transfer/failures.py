"""The codes by which a transfer ends without its pages, as far as they are made here.

Installed transports have codes of their own, and an agent that cannot be asked for its pool brings those of asks
(`mesh/errors.py`). `tests/kvstore/transfer/test_failures.py` finds the literals that are missing here.
"""

from typing import Final

TRANSFER_FAILURES: Final = (
    "bad_announcement", "bad_answer", "bad_descriptor", "bad_offer", "bad_stream", "cancelled", "corrupt_pages",
    "deadline_exceeded", "device_fault", "grant_closed", "holder_lost", "layout_mismatch", "memory_released",
    "mixed_memory", "not_served", "pair_aborted", "pool_closed", "pool_missing", "pool_released", "read_failed",
    "source_changed", "source_failed", "source_lost", "stale_pages", "tcp_unavailable", "token_refused",
    "too_many_pairs", "unequal_ranks", "unknown_group", "unsigned_pages", "unsupported",
)  # fmt: skip
