"""Asks again for missing output, through the same detokenizer and then another. Pure; owned by the core."""

from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests.events import Command, SendResend, Suspect
from nodes.gateway.requests.log import RequestState
from nodes.gateway.requests.peers import Peers
from nodes.gateway.requests.retrying import GAP_PAUSE_S, MAX_RESEND_PAUSE_S, RESENDS_BEFORE_OTHER_DETOKENIZER
from nodes.protocol import ResendFrom


class Resends:
    """Gathers what the current event has to ask for again, as one message per scheduler and new detokenizer."""

    def __init__(self, config: GatewayConfig, peers: Peers) -> None:
        self._config = config
        self._peers = peers
        self.streams: dict[tuple[str, str], list[ResendFrom]] = {}
        """What `take` has to ask for, by scheduler and new detokenizer."""
        self._suspects: list[Command] = []
        self.num_resends = 0

    def after_gap(self, state: RequestState, position: int, now: float) -> None:
        """Output came that does not follow what is here; most often the part in between is still on its way."""
        # Every delta after a gap shows it again: one request is enough until there was time to answer it.
        if now >= state.gap_until:
            self.ask_again(state, position, now)
            state.gap_until = now + GAP_PAUSE_S * 2 ** min(state.num_resends, 5)

    def ask_again(self, state: RequestState, position: int, now: float) -> None:
        """Ask for missing output; through another detokenizer if asking did not help or the present one is away."""
        state.num_resends += 1
        # Every third: the first two are for frames that were lost, where another detokenizer does not help.
        in_vain = state.num_resends % RESENDS_BEFORE_OTHER_DETOKENIZER == 0
        if in_vain:
            # Our tells may be going into a link that its other end has dropped.
            self._suspects.append(Suspect(state.scheduler))
        leave = in_vain or not self._peers.has_detokenizer(state.detokenizer)
        self.resend(state, position, now, leave=state.detokenizer if leave else "")

    def resend(self, state: RequestState, position: int, now: float, leave: str = "") -> None:
        """Ask for output from `position` on, through a detokenizer other than `leave` if there is one."""
        if leave and (other := self._peers.other_detokenizer(state.opened.request_id, leave)):
            state.detokenizer = other
            state.switched = True
        changed = state.detokenizer if state.switched else ""
        # Grouped: when a detokenizer dies, all its requests ask at once, in one message per scheduler.
        stream = ResendFrom(state.opened.request_id, state.attempt, position, state.prompt_position)
        self.streams.setdefault((state.scheduler, changed), []).append(stream)
        # Not by a `Retrier`: the only answer is the text itself, from a position that moves on meanwhile.
        state.resend_at = now + min(MAX_RESEND_PAUSE_S, self._config.quiet_s * 2 ** min(state.num_resends, 8))

    def take(self) -> list[Command]:
        commands = self._suspects
        for (scheduler, detokenizer), streams in self.streams.items():
            commands.append(SendResend(scheduler, detokenizer, streams))
            self.num_resends += len(streams)
        self.streams, self._suspects = {}, []
        return commands
