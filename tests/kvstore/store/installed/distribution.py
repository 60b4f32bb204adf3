"""What pip leaves of a distribution that brings stores, in a folder that is then put on the path."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvstore.store.installed.plugins import GROUP

EXAMPLE = Path(__file__).parents[4] / "examples" / "folder_store"


def write(folder: Path, points: Mapping[str, str]) -> None:
    """A distribution named like the folder, with these entry points; their modules are somewhere on the path."""
    about = folder / f"{folder.name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


def write_example(folder: Path) -> list[Path]:
    """The example's distribution. Returns what is to be on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    write(folder, project["entry-points"][GROUP])
    return [folder, EXAMPLE]
