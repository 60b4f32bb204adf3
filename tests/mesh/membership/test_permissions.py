"""Who may send what: of other hosts by role, of the own host anybody."""

import pytest

from mesh.address import Address, Endpoint
from mesh.errors import FrameRefused
from mesh.membership.permissions import Permissions
from mesh.membership.view import Member


@pytest.mark.parametrize(
    ("kind", "sender", "role", "is_taken"),
    [
        (int, "b.d", "boss", True),
        (int, "w.d", "worker", False),
        (int, "w.d", "", False),
        (int, "w.head", "worker", True),
        (int, "meshctl-7-1", "meshctl", True),
        (str, "w.d", "worker", True),
    ],
)
def test_a_kind_is_taken_of_its_roles_and_of_the_own_host(kind, sender, role, is_taken):
    permissions = Permissions({int: ("boss",)}, "head")
    member = Member(sender, role, 1, Endpoint("", "")) if role else None
    if is_taken:
        permissions.check(kind, Address(sender, 1), member)
        return
    with pytest.raises(FrameRefused, match="may not send int") as refused:
        permissions.check(kind, Address(sender, 1), member)
    assert refused.value.code == "not_permitted"
