"""Clients that go on asking while something is done to their mesh."""

import threading
import time
import urllib.error
from collections.abc import Callable


class Load:
    """Each client asks one thing after the other; whatever is not the right answer is kept.

    `ask(number, count)` returns what client `number` is answered, and what it should be; `count` answers came before.
    `forgives_resets`: a gateway that ends lets go of connections that it has not taken yet, and clients try again.
    """

    def __init__(
        self, host, ask: Callable[[int, int], tuple[str, str]], num_clients: int = 4, *, forgives_resets: bool = False
    ) -> None:
        self._host, self._ask, self._over, self._forgives_resets = host, ask, threading.Event(), forgives_resets
        self.num_answers, self.slowest_s, self.wrong = 0, 0.0, []
        self._threads = [threading.Thread(target=self._go_on, args=(number,)) for number in range(num_clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _go_on(self, number):
        while not self._over.is_set():
            began = time.monotonic()
            try:
                answer, expected = self._ask(number, self.num_answers)
            except urllib.error.HTTPError as error:
                self.wrong.append(f"{error}: {error.read().decode()}")
            except OSError as error:
                is_reset = isinstance(getattr(error, "reason", error), ConnectionResetError)
                if not (is_reset and self._forgives_resets):
                    self.wrong.append(repr(error))
            else:
                self.num_answers += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if answer != expected:
                    self.wrong.append(answer)

    def more(self, count: int = 8) -> None:
        """Wait for so many more answers."""
        target = self.num_answers + count
        self._host.wait_until(lambda: self.num_answers >= target or self.wrong, "clients are answered", 60)
