"""How the suite is spread over pytest-xdist's workers: all that starts whole meshes runs in one of them, in turn."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
WITH_WHOLE_MESHES = ("chaos", "clients", "process", "serving", "simulation/test_whole_mesh.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if any(item.path.is_relative_to(ROOT / place) for place in WITH_WHOLE_MESHES):
            # Two at once would only wait for each other's processes.
            item.add_marker(pytest.mark.xdist_group("whole meshes"))
