"""The page at `/`, the same for everybody: it says nothing of the mesh, which its script reads from `/events/mesh`.

It is one document, put together once from the files beside this one. Its content policy allows this script and this
style, by their hashes, and requests to this server; nothing that comes from elsewhere can run in it.
"""

import base64
import hashlib
from importlib.resources import files
from typing import Final

_FILES: Final = files("nodes.gateway.page")
_SCRIPTS: Final = ("base.js", "ring.js", "graphs.js", "requests.js", "chat.js", "main.js")


def _text(*names: str) -> str:
    return "".join(_FILES.joinpath(name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE: Final = _text("page.css")
_SCRIPT: Final = '"use strict";\n' + _text(*_SCRIPTS)
PAGE: Final = _text("page.html").replace("/*style*/", _STYLE).replace("/*script*/", _SCRIPT).encode()
"""HTML."""
_POLICY: Final = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    # The page and the events that it reads are of one version.
    (b"cache-control", b"no-cache"),
)
