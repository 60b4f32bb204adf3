"""What tests of real links wait for."""

import time
from collections.abc import Callable

from kvstore.transfer.paired.link import Broken, News, PairLink

LIMIT_S = 30.0


def wait_for(is_so: Callable[[], object]) -> None:
    """What another thread or process brings about, which tells nobody."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, f"not in {LIMIT_S:.0f} s"
        time.sleep(0.001)


def until(link: PairLink, is_there: Callable[[list[News]], bool]) -> list[News]:
    """The news of a link up to those that are waited for."""
    found: list[News] = []

    def look() -> bool:
        found.extend(link.news())
        return is_there(found)

    wait_for(look)
    return found


def broken(link: PairLink) -> Broken:
    found = until(link, lambda found: any(isinstance(one, Broken) for one in found))
    return next(one for one in found if isinstance(one, Broken))
