"""Output that does not come is asked for again, by the same way and then by another. Pure; owned by the core."""

from nodes.gateway.config import GatewayConfig
from nodes.gateway.events import Command, SendResend, Suspect
from nodes.gateway.peers import Peers
from nodes.gateway.requests import RequestState
from nodes.gateway.retrying import MAX_RESEND_PAUSE_S, RESENDS_BEFORE_OTHER_DETOKENIZER
from nodes.protocol import ResendFrom


class Resends:
    """What the event at hand has to ask for again: gathered, and taken as one message for each way."""

    def __init__(self, config: GatewayConfig, peers: Peers) -> None:
        self._config = config
        self._peers = peers
        self._streams: dict[tuple[str, str], list[ResendFrom]] = {}
        self._suspects: list[Command] = []
        self.num_resends = 0

    def after_gap(self, state: RequestState, position: int, now: float) -> None:
        """What came does not follow what is here; most often what lies between is on its way."""
        # Everything that follows a gap shows it again: one request for it is enough until there was time to answer.
        if now >= state.gap_until:
            self.ask_again(state, position, now)
            state.gap_until = now + self._config.gap_pause_s * 2 ** min(state.num_resends, 5)

    def ask_again(self, state: RequestState, position: int, now: float) -> None:
        """Output is missing. If asking did not help, or the detokenizer is not there, it goes another way."""
        state.num_resends += 1
        # Every third: the first two are for frames that were lost, which another detokenizer does not help.
        in_vain = state.num_resends % RESENDS_BEFORE_OTHER_DETOKENIZER == 0
        if in_vain:
            # What is told may go into a link whose other end has let go of it.
            self._suspects.append(Suspect(state.scheduler))
        leave = in_vain or not self._peers.has_detokenizer(state.detokenizer)
        self.resend(state, position, now, leave=state.detokenizer if leave else "")

    def resend(self, state: RequestState, position: int, now: float, leave: str = "") -> None:
        """Ask for output from `position` on, by way of another detokenizer than `leave` if there is one."""
        if leave and (other := self._peers.other_detokenizer(state.opened.request_id, leave)):
            state.detokenizer = other
            state.switched = True
        changed = state.detokenizer if state.switched else ""
        # Gathered by way: when a detokenizer dies all its requests ask at once, in one message for each scheduler.
        stream = ResendFrom(state.opened.request_id, state.attempt, position)
        self._streams.setdefault((state.scheduler, changed), []).append(stream)
        # Not by a `Retrier`: there is no answer but the text itself, from a position that moves on meanwhile.
        state.resend_at = now + min(MAX_RESEND_PAUSE_S, self._config.quiet_s * 2 ** min(state.num_resends, 8))

    def take(self) -> list[Command]:
        """All that has gathered."""
        if not self._streams:
            return []
        commands = self._suspects
        for (scheduler, detokenizer), streams in self._streams.items():
            commands.append(SendResend(scheduler, detokenizer, streams))
            self.num_resends += len(streams)
        self._streams, self._suspects = {}, []
        return commands
