"""What all hosts of a mesh have in common, as text by name: its name, release, model, layout and so on. Pure.

The registry has the mesh's; each host says its own when its actors join. Who knows other names than these is compared
by those that both have.
"""

from collections.abc import Mapping
from typing import Final

LAYOUT: Final = "layout"
"""Of KV pages, as a hash."""


def spec_faults(spec: Mapping[str, str], mesh_spec: Mapping[str, str]) -> list[str]:
    """In words what of a host's spec is not the mesh's; empty where the host fits."""
    wrong = [name for name in mesh_spec if name in spec and spec[name] != mesh_spec[name]]
    # It is made of the model and its page size among others, and says nothing to people where one of these is wrong.
    if len(wrong) > 1:
        wrong = [name for name in wrong if name != LAYOUT]
    return [f"{name.replace('_', ' ')} is {spec[name]} here and {mesh_spec[name]} in the mesh" for name in wrong]
