"""Grants as leases under anything that schedulers, copies, peers and time can do.

The model is the pool: which grant each copy writes for. No page is written for two grants, none after its grant was
said to be closed, and left alone the agent comes to rest with nothing held.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.layout import KVLayout
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    OpenGrant,
    TransferFailed,
)
from kvstore.transfer.session import CopyEnded, SessionLimits
from mesh.address import Address
from mesh.runtime.effects import Asked, Refuse, Reply, Tell, Told
from nodes.kv_agent.core import AgentCore, Bounds, Pool
from nodes.kv_agent.events import (
    CancelPull,
    CopyDone,
    Event,
    MapForeign,
    PeerGone,
    SourceId,
    SourceMapped,
    SourceRefused,
    StartPull,
    Tick,
    UnmapForeign,
)
from tests.nodes.kv_agent.one_by_one import grant_of, ready_of, together

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8)
HOLDERS = ["D", "E"]
GRANTS = [f"g{number}" for number in range(6)]
FAR = SourceId("far", "p")
LIMITS = SessionLimits(map_s=2, waiting_s=5, copy_s=3, resend_s=0.5, linger_s=4, max_pages_per_copy=2)


class AgentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        pools = [Pool("d", "/d", 8, LAYOUT, 1), Pool("p", "/p", 8, LAYOUT, 1)]
        self.core = AgentCore("agent", pools, Bounds(4, 3, LIMITS))
        self.now = 0.0
        self.calls = 0
        self.epochs = dict.fromkeys(HOLDERS, 1)
        self.asked: dict[int, Asked] = {}
        self.opened: dict[str, OpenGrant] = {}
        self.closed: set[str] = set()
        self.copies: dict[str, StartPull] = {}
        self.cancelled: set[str] = set()
        self.is_mapping = False
        self.ends: dict[str, set[str]] = {}

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case Reply(call, message):
                    asked = self.asked.pop(call)
                    if isinstance(message, GrantsOpened):
                        self.opened |= {
                            one.grant_id: one for one in asked.message.grants if one.grant_id in message.opened
                        }
                    else:
                        assert isinstance(message, GrantClosed)
                        assert message.grant_id not in self.copies, "said to be closed while a copy may write"
                        self.closed.add(message.grant_id)
                case Refuse(call):
                    del self.asked[call]
                case StartPull():
                    self.start(command)
                case CancelPull(grant_id):
                    assert grant_id in self.copies
                    self.cancelled.add(grant_id)
                case MapForeign():
                    assert not self.is_mapping
                    self.is_mapping = True
                case UnmapForeign():
                    pass
                case Tell(_, message):
                    if isinstance(message, TransferFailed):
                        if message.code not in ("unknown_grant", "grant_taken"):
                            self.ends.setdefault(message.grant_id, set()).add("failed")
                    elif message.complete:
                        self.ends.setdefault(message.grant_id, set()).add("success")

    def start(self, command: StartPull) -> None:
        grant = self.opened[command.grant_id]
        assert command.grant_id not in self.closed
        assert command.grant_id not in self.copies
        assert set(command.copy.pages) <= set(grant.pages)
        assert command.copy.generations == [grant.generations[grant.pages.index(page)] for page in command.copy.pages]
        for other in self.copies.values():
            assert not set(other.copy.pages) & set(command.copy.pages), "two writers of one page"
        self.copies[command.grant_id] = command

    def ask(self, event: Asked) -> None:
        self.asked[event.call] = event
        self.feed(event)

    @rule(grant_id=st.sampled_from(GRANTS), holder=st.sampled_from(HOLDERS), data=st.data())
    def open_grant(self, grant_id: str, holder: str, data: st.DataObject) -> None:
        if grant_id in self.opened and data.draw(st.booleans()):
            message = self.opened[grant_id]
        elif grant_id in self.opened:
            return
        else:
            pages = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4, unique=True))
            message = grant_of(
                pages, LAYOUT.digest, grant_id=grant_id, holder=holder, holder_epoch=self.epochs[holder],
                generations=[10 * page + GRANTS.index(grant_id) for page in pages],
                timeout_s=data.draw(st.sampled_from([1.0, 6.0])),
            )  # fmt: skip
        self.calls += 1
        self.ask(Asked(Address(message.holder, message.holder_epoch), together(message), self.calls))

    @rule(grant_id=st.sampled_from(GRANTS))
    def close_grant(self, grant_id: str) -> None:
        grant = self.opened.get(grant_id)
        if grant is not None:
            self.calls += 1
            holder = Address(grant.holder, self.epochs[grant.holder])
            self.ask(Asked(holder, CloseGrant(grant_id=grant_id), self.calls))

    @rule(grant_id=st.sampled_from(GRANTS), first=st.integers(0, 3), is_far=st.booleans(), epoch=st.integers(1, 2))
    def announce(self, grant_id: str, first: int, is_far: bool, epoch: int) -> None:
        grant = self.opened.get(grant_id)
        total = len(grant.pages) if grant else 2
        pages = list(range(first, total))
        message = ready_of(
            [page + 1 for page in pages], LAYOUT.digest, grant_id=grant_id, first=min(first, total), total=total,
            source_agent="far" if is_far else "agent", source_incarnation=1,
            generations=[500 + page for page in pages],
        )  # fmt: skip
        self.feed(Told(Address("P", epoch), together(message)))

    @rule(is_there=st.booleans(), incarnation=st.sampled_from([1, 1, 2]))
    def mapping_ends(self, is_there: bool, incarnation: int) -> None:
        if self.is_mapping:
            self.is_mapping = False
            if is_there:
                self.feed(SourceMapped(FAR, incarnation, LAYOUT.digest))
            else:
                self.feed(SourceRefused(FAR, "peer_lost", ""))

    @rule(grant_id=st.sampled_from(GRANTS), code=st.sampled_from(["", "", "stale_pages"]))
    def copy_ends(self, grant_id: str, code: str) -> None:
        copy = self.copies.pop(grant_id, None)
        if copy is not None:
            if grant_id in self.cancelled:
                self.cancelled.discard(grant_id)
                code = "cancelled"
            self.feed(CopyDone(grant_id, CopyEnded(copy.copy.copy_id, code), 1))

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule(holder=st.sampled_from(HOLDERS), announced=st.booleans())
    def holder_restarts(self, holder: str, announced: bool) -> None:
        self.epochs[holder] += 1
        if announced:
            self.feed(PeerGone(Address(holder, self.epochs[holder] - 1), "killed"))

    @rule(actor_id=st.sampled_from(["P", "far"]), epoch=st.integers(1, 2))
    def peer_gone(self, actor_id: str, epoch: int) -> None:
        self.feed(PeerGone(Address(actor_id, epoch), "killed"))

    @invariant()
    def books_agree(self) -> None:
        live = [session for session in self.core.sessions if not session.is_quiesced]
        assert self.core.num_live == len(live) <= 4
        granted = [page for one in live for page in one.grant.pages]
        assert len(granted) == len(set(granted)), "a page in two live grants"
        assert set(self.copies) <= {one.grant.grant_id for one in live}
        assert len(self.core.sessions) <= 4 + 3
        for ends in self.ends.values():
            assert len(ends) == 1, "told both that it succeeded and that it failed"
        assert all(isinstance(asked.message, CloseGrant) for asked in self.asked.values()), "opens are answered at once"

    def teardown(self) -> None:
        for _ in range(3000):
            for grant_id in list(self.copies):
                self.copy_ends(grant_id, "")
            if self.core.next_deadline is None:
                break
            self.now = max(self.now, self.core.next_deadline)
            self.feed(Tick())
        assert (self.core.next_deadline, len(self.core.sessions), self.core.num_live) == (None, 0, 0)
        everything = grant_of([1, 2, 3, 4, 5, 6, 7], LAYOUT.digest, grant_id="all", holder="F")
        self.ask(Asked(Address("F", 1), together(everything), 0))
        assert "all" in self.opened, "no page is in a grant any more"
        assert not self.asked, "every call was answered"


TestAgentMachine = AgentMachine.TestCase
TestAgentMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
