"""The page at `/docs`: shows `/openapi.json` and lets one try it. Fetches nothing from elsewhere, which its own policy
forbids, so it works where there is no other network than the mesh's.
"""

from importlib.resources import files
from typing import Final

DOCS_PAGE: Final = files("nodes.gateway").joinpath("docs_page.html").read_bytes()
"""HTML, the same for every gateway."""
