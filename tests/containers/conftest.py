"""An image of the sources as they are, and a network of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.containers.image import NoContainers, base_image, build, dependencies_name, image_name, is_built
from benchmarks.containers.world import World


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> str:
    """Built if podman does not have it. Its dependencies only if a test asks for containers by its mark.

    Those take minutes and a network, and CI has neither to spare: the quick test is skipped where they are not cached.
    """
    try:
        base = base_image()
    except NoContainers as reason:
        pytest.skip(str(reason))
    name = image_name(base)
    if not is_built(name):
        may_take_minutes = any(item.get_closest_marker("containers") for item in request.session.items)
        if not may_take_minutes and not is_built(dependencies_name(base)):
            pytest.skip(f"podman has no {dependencies_name(base)}: `pytest -m containers` builds it")
        build(base)
    return name


@pytest.fixture
def world(image: str, tmp_path: Path) -> Iterator[World]:
    made = World(image)
    try:
        yield made
    finally:
        made.keep_logs(tmp_path)
        made.remove()
