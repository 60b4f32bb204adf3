"""What an engine and the process that it starts for its mesh say to each other, a line of JSON each.

engine --StartMesh, then nothing until it ends--> supervisor    stdin; its end is the mesh's
<--Begun, then AllReady; or Refused-------               stdout
engine --AttachTo-------------------------------> helper, which ends with its answer, as above
"""

import re
from typing import Any, Final

import msgspec

MESH_NAME: Final = re.compile(r"engine-[0-9a-f]{12}")
"""Meshes of engines, each of which has a name of its own: nobody but another engine's start looks for what is left."""


class StartMesh(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a mesh named `mesh` whose only gateway is incarnation `epoch` of `gateway`, in the asking process.

    `settings` are those of `meshctl up`, by their names there; `file` is a topology file, "" for none.
    """

    mesh: str
    gateway: str
    epoch: int
    settings: dict[str, Any] = {}
    file: str = ""


class AttachTo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let a gateway in the asking process join a mesh that runs; the names are as in `StartMesh`."""

    mesh: str
    gateway: str
    epoch: int


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The gateway can join as `gateway` with this proof (`mesh/membership/proof.py`).

    `config` are the fields of its `GatewayConfig`. A mesh that is starting serves later, or is refused later.
    `supervisor_pid` is the process whose end is that of a mesh to attach to; 0: the one that says this.
    `start_timeout_s`: how long the gateway may take from then on, or from `AllReady` in a mesh that is starting.
    """

    gateway: str
    proof: bytes
    config: dict[str, Any]
    supervisor_pid: int = 0
    start_timeout_s: float = 120.0


class AllReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every other actor of the mesh that was begun is ready."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is no such mesh, or will not be: what is wrong, why, and what to do, as `meshctl` says it."""

    what: str
    why: str
    do: str


Wish = StartMesh | AttachTo
News = Begun | AllReady | Refused
