"""What the keeper of processes knows of one actor, and what `meshctl ps` shows of it. Pure."""

import msgspec

from cli.plan.topology import ActorLaunch
from cli.protocol import ActorStatus
from cli.supervisor.kept.log_files import LastLines
from cli.supervisor.kept.mesh_directory import ProcessRecord
from mesh.address import Endpoint
from mesh.membership.view import READY, RELEASED, Member
from mesh.runtime.supervisor_line import SupervisorEnd
from mesh.supervision.core import Watch
from mesh.supervision.events import SPAWNING

_NOWHERE = Endpoint("", "")


class KeptActor(msgspec.Struct):
    """What is known of one actor. `process` is the present one, `line` goes to it, `is_released` is what it says."""

    launch: ActorLaunch
    watch: Watch
    process: ProcessRecord | None = None
    line: SupervisorEnd | None = None
    last_lines: LastLines | None = None
    is_released: bool = False

    def why_unready(self) -> str:
        """In words: its state, and the last reason that it gave, or the supervisor had, for not being ready."""
        watch = self.watch
        said = self.last_lines.last_reason() if self.last_lines is not None else ""
        if not said and watch.state == SPAWNING and self.launch.start == "fork":
            said = "the zygote, which it is forked from, is not ready"
        return ", ".join(filter(None, (watch.state, watch.progress, said, watch.reason)))

    def status(self, member: Member | None, now: float) -> ActorStatus:
        watch, process = self.watch, self.process
        there = member if process is not None and member is not None and member.epoch == watch.epoch else None
        pid, uptime_s = (process.pid, now - watch.born_at) if process is not None else (0, 0.0)
        endpoint, notes = (there.endpoint, said_notes(there)) if there is not None else (_NOWHERE, [])
        return ActorStatus(
            actor_id=self.launch.actor_id,
            role=self.launch.role,
            pid=pid,
            epoch=watch.epoch,
            endpoint=endpoint,
            # It is there and healthy, but takes no work.
            state=RELEASED if watch.state == READY and self.is_released else watch.state,
            num_restarts=watch.num_restarts,
            uptime_s=uptime_s,
            reason=watch.reason,
            notes=[*filter(None, [watch.progress]), *notes],
            num_starts=watch.num_starts,
            num_deaths=watch.num_deaths,
            num_requested_restarts=watch.num_requested_restarts,
            last_reason=watch.reason,
            last_reason_age_s=now - watch.reason_at if watch.reason else 0.0,
            next_start_in_s=None if watch.next_start_at is None else max(0.0, watch.next_start_at - now),
        )


def said_notes(member: Member) -> list[str]:
    """What a living actor says of itself that an operator should know."""
    fallbacks: dict[str, str] = member.attributes.get("fallbacks", {})
    notes = [f"pages of {agent} come by {text}" for agent, text in fallbacks.items()]
    if num_pages := member.attributes.get("damaged_pages", 0):
        notes.append(
            f"{num_pages} pages of KV are out of use, as its books disagreed about them (its log names them); "
            f"`meshctl restart {member.actor_id}` brings them back"
        )
    return notes
