"""Which reads of the same pages `disks.py` takes for a fault."""

import pytest

from mesh.simulation.faults import Faults
from tests.kvstore.store.test_source import Restoring
from tests.simulation.disks import DiskMesh


@pytest.mark.parametrize("is_given_up", [True, False])
@pytest.mark.parametrize("has_read", [True, False])
def test_only_a_read_that_was_given_up_may_go_on_beside_the_next(is_given_up: bool, has_read: bool) -> None:
    """Also one that the disk has done, of which a busy agent has not heard yet."""
    mesh, restoring = DiskMesh(0, Faults(), mixed=True, theme=""), Restoring()
    mesh._num_deaths = 0
    mesh._watch(restoring.transport)
    restoring.start(1)
    if has_read:
        for lane in restoring.lanes:
            lane.close()
        restoring.transport.work(restoring.now)
    assert restoring.transport.has_ended == has_read
    if is_given_up:
        restoring.puller.cancel("grant", 1)
    restoring.start(2)
    assert bool(mesh.problems) != is_given_up
    restoring.run()
    assert mesh.counts["restores begun"] == 2
    assert not mesh._given_up
    assert not any(mesh._reading.values())
