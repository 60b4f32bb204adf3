"""What roles are for: whoever takes a message of other hosts knows whom it may come from."""

from cli.protocol import SUPERVISOR_CODEC
from nodes import roles
from nodes.roles import NODE_CODEC

ANSWERS = {
    "PoolHandle", "GrantsOpened", "GrantClosed", "PairAccepted", "PagesSent", "Prepared", "Route", "Detokenized",
    "AttemptsSubmitted", "AttemptsCancelled", "Adopted", "PrefillsOrdered", "PrefillCancelled", "MemoryList",
    "HasLetGo", "HasTakenUp", "PagesOffered", "GroupFormed", "ActorList", "Stopping", "Restarting", "ActorProof",
    "LogList", "LogParts", "AllowListTaken",
}  # fmt: skip
PUBLISHED = {"CacheEvents", "Load"}


def test_each_message_that_asks_or_tells_says_which_roles_may_send_it():
    for codec in (NODE_CODEC, SUPERVISOR_CODEC):
        unsaid = {kind.__name__ for kind in codec.types - codec.senders.keys()}
        assert unsaid <= ANSWERS | PUBLISHED
        known = {value for name, value in vars(roles).items() if name.isupper() and isinstance(value, str)}
        assert {role for allowed in codec.senders.values() for role in allowed} <= known
