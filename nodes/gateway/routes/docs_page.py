"""The page at `/docs`: shows `/openapi.json` and lets users try it. It fetches nothing from elsewhere (its own content
security policy forbids that), so it works without any network but the mesh's.
"""

from importlib.resources import files
from typing import Final

DOCS_PAGE: Final = files("nodes.gateway.routes").joinpath("docs_page.html").read_bytes()
"""HTML, the same for every gateway."""
