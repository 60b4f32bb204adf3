"""Roles and permissions: an actor that takes messages from other hosts knows which roles may send them."""

from importlib import import_module

import pytest

from cli.protocol import SUPERVISOR_CODEC
from cli.supervisor.actor import SupervisorActor
from mesh.actor import Actor
from nodes import roles
from nodes.roles import NODE_CODEC, REGISTRY, ROLES, SUPERVISOR

ANSWERS = {
    "PoolHandle", "GrantsOpened", "GrantClosed", "PairAccepted", "PagesSent", "Prepared", "Route", "Detokenized",
    "AttemptsSubmitted", "AttemptsCancelled", "Adopted", "PrefillsOrdered", "PrefillCancelled", "MemoryList",
    "HasLetGo", "HasTakenUp", "PagesOffered", "GroupFormed", "ActorList", "Stopping", "Restarting", "ActorProof",
    "LogList", "LogParts", "AllowListTaken", "VocabularyIs", "TemplateIs", "TokenizerIs", "ResponseIs",
    "RequestsAborted", "CacheFlushed", "CallsFound", "NotesFound", "StoreOpened", "StoredFound", "StoreList",
    "StoresFlushed", "FatesFound", "MovesChosen", "StoredPagesListed",
}  # fmt: skip
PUBLISHED = {"CacheEvents", "Load"}


def test_each_message_that_asks_or_tells_says_which_roles_may_send_it():
    for codec in (NODE_CODEC, SUPERVISOR_CODEC):
        unsaid = {kind.__name__ for kind in codec.types - codec.senders.keys()}
        assert unsaid <= ANSWERS | PUBLISHED
        known = {value for name, value in vars(roles).items() if name.isupper() and isinstance(value, str)}
        assert {role for allowed in codec.senders.values() for role in allowed} <= known


# The registry speaks only the mesh's own messages, which `Credentials` judges.
@pytest.mark.parametrize("role", sorted(ROLES - {REGISTRY, SUPERVISOR}))
def test_each_role_takes_messages_from_those_roles_only(role: str):
    made_here = vars(import_module(f"nodes.{role}.actor")).values()
    actors = [one for one in made_here if isinstance(one, type) and issubclass(one, Actor) and one.role == role]
    assert actors, f"nodes/{role}/actor.py has no actor"
    assert all(actor.codec is NODE_CODEC for actor in actors)


def test_a_supervisor_takes_messages_from_those_roles_only():
    assert SupervisorActor.codec is SUPERVISOR_CODEC
