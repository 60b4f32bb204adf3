"""What all hosts of a mesh have in common, as text by name: its name, release, model, layout and so on. Pure.

The registry has the mesh's spec; each host sends its own when its actors join. Only names that both specs contain are
compared.
"""

from collections.abc import Mapping
from typing import Final

LAYOUT: Final = "layout"
"""The layout of KV pages, as a hash."""


def spec_faults(spec: Mapping[str, str], mesh_spec: Mapping[str, str]) -> list[str]:
    """How a host's spec differs from the mesh's, in words; empty if the host fits."""
    wrong = [name for name in mesh_spec if name in spec and spec[name] != mesh_spec[name]]
    # The layout hash depends on the model and page size, among others: it tells people nothing if one of these differs.
    if len(wrong) > 1:
        wrong = [name for name in wrong if name != LAYOUT]
    return [f"{name.replace('_', ' ')} is {spec[name]} here and {mesh_spec[name]} in the mesh" for name in wrong]
