"""Write `tests/golden/*.json` and the generated parts of `docs/protocol.md` from the code as it is.

Look at the diff before you commit it: a vector that changes is a protocol change that older peers notice.
"""

import json
import logging
from pathlib import Path

import structlog

from tools.protocol_reference.samples import all_vectors
from tools.protocol_reference.session import record
from tools.protocol_reference.tables import fill

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PAGE = ROOT / "docs" / "protocol.md"


def main() -> None:
    """Write all of it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    session = record()
    GOLDEN.mkdir(exist_ok=True)
    for name, content in (("vectors", all_vectors()), ("session", session)):
        path = GOLDEN / f"{name}.json"
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(path.relative_to(ROOT))
    PAGE.write_text(fill(PAGE.read_text(), session))
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
