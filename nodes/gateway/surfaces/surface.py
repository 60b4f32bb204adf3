"""What a surface is: a route that generates, with its forms of answers. One file each beside this one."""

from typing import ClassVar, Protocol

import msgspec

from nodes.gateway.outputs import Generation
from nodes.gateway.responses import Head
from nodes.gateway.sse import ChunkWriter
from nodes.gateway.token_details import TokenDetails


class Surface(Protocol):
    """Answers of one route. `id_prefix` begins the ids of its requests; the `_object`s are names in its answers."""

    path: ClassVar[str]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, head: Head, generation: Generation, details: TokenDetails) -> msgspec.Struct:
        """The answer to a call whose samples have all ended; takes what is in its output."""
        ...

    def chunks(self, head: Head, details: TokenDetails, num_samples: int, *, usage: bool) -> ChunkWriter:
        """What writes a streamed answer; with `usage` every chunk has a usage field."""
        ...
