"""The schedulers and detokenizers that the gateway's core knows, as of the last events. Pure; owned by `core.py`."""

from zlib import crc32

from nodes.gateway.requests.events import DetokenizersChanged, SchedulersChanged


class Peers:
    """Schedulers and detokenizers. A scheduler's epoch is 0 if it is not ready."""

    def __init__(self) -> None:
        self._detokenizers: list[str] = []
        self._schedulers = SchedulersChanged({})
        self.bits = self._schedulers.bits

    def take(self, event: DetokenizersChanged | SchedulersChanged) -> None:
        if isinstance(event, DetokenizersChanged):
            self._detokenizers = event.ready
        else:
            self._schedulers, self.bits = event, event.bits

    def epoch_of(self, scheduler: str) -> int:
        return self._schedulers.ready.get(scheduler, 0)

    def is_stand_in(self, scheduler: str) -> bool:
        return scheduler in self._schedulers.stand_ins

    def has_equal(self, scheduler: str, *, with_stand_ins: bool) -> bool:
        """Whether another one is ready that computes the same bits; stand-ins may not count."""
        bits = self.bits.get(scheduler)
        return (
            bits is not None
            and bits.are_known
            and any(
                other != scheduler and self.bits.get(other) == bits and (with_stand_ins or not self.is_stand_in(other))
                for other in self._schedulers.ready
            )
        )

    def has_detokenizer(self, actor_id: str) -> bool:
        return actor_id in self._detokenizers

    def other_detokenizer(self, request_id: str, than: str) -> str:
        """One for this request, the same each time; empty if there is no other. Requests of a lost one are spread."""
        others = [actor_id for actor_id in self._detokenizers if actor_id != than]
        return others[crc32(request_id.encode()) % len(others)] if others else ""
