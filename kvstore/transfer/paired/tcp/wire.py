"""What two agents send over the raw connections of a pair, and how a transfer is split over them.

    mesh      OfferPair.unique_id   `Rendezvous`: where rank 0 listens, a key and a secret
    dialler   HELLO                 magic, key of the pair, number of the connection, proof of the secret
    listener  ANSWER                proof of the secret
    dialler   for each transfer and connection that has a share of it: HEADER, then that share's bytes

The secret travels over the mesh only, so a stranger who finds the port is refused. Bytes are neither encrypted nor
signed. Both ends compute the shares from the transfer's parts: there are no frames inside a share. Pure; used by
`tcp/link.py` and `listener.py`.
"""

import hashlib
import hmac
import ipaddress
import re
import struct
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from kvstore.errors import TransferError

KEY_BYTES: Final = 16
"""Names a pair; 128 bits drawn at random never repeat."""
SECRET_BYTES: Final = 32
"""256 bits, as a key of BLAKE2b."""
MAX_STREAMS: Final = 16
"""One fills a core at each end (2.6 GB/s): 16 are more than a network of 200 Gbit/s carries (25 GB/s)."""
MIN_CHUNK_BYTES: Final = 1 << 16
"""Below 64 KiB a connection's share is mostly system calls."""
MAX_CHUNK_BYTES: Final = 1 << 24
"""With pages on a device each connection has two page-locked buffers of this size: 512 MiB for 16 connections."""
# A system call takes 1,024 pieces of memory at most.
MAX_PIECES: Final = 512

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_HELLO: Final = struct.Struct("<8s16sI4x32s")
_HELLO_MAGIC: Final = b"KVMESHP1"
_HEADER: Final = struct.Struct("<8sQQ")
_HEADER_MAGIC: Final = b"KVMESHT1"

HELLO_BYTES: Final = _HELLO.size
ANSWER_BYTES: Final = 32
"""BLAKE2b with 32 bytes: as long as the secret that it proves."""
HEADER_BYTES: Final = _HEADER.size

Part = tuple[int, int]
"""Offset from page 0, and number of bytes."""


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Where and how the two ends of a pair connect; encoded, it is the `unique_id` that both are given."""

    host: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    num_streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]


class Hello(NamedTuple):
    """The dialler's first message: it is connection number `stream` of pair `key`."""

    key: bytes
    stream: int
    proof: bytes


def encode_rendezvous(rendezvous: Rendezvous) -> bytes:
    return msgspec.msgpack.encode(rendezvous)


def decode_rendezvous(data: bytes) -> Rendezvous:
    """Decode another agent's offer. Raises TransferError `bad_offer`."""
    try:
        rendezvous = msgspec.msgpack.decode(data, type=Rendezvous)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError("bad_offer", f"an invalid tcp offer: {error}") from None
    if address_of(rendezvous.host) is None and not is_name(rendezvous.host):
        raise TransferError("bad_offer", f"an invalid tcp offer: {rendezvous.host!r} is not a host")
    return rendezvous


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_name(host: str) -> bool:
    return _NAME.fullmatch(host) is not None


def encode_hello(rendezvous: Rendezvous, index: int) -> bytes:
    return _HELLO.pack(_HELLO_MAGIC, rendezvous.key, index, _proof(rendezvous.secret, rendezvous.key, index, b"dial"))


def decode_hello(data: bytes) -> Hello | None:
    """The hello in these bytes, None if they are of another protocol. `is_proven` checks the proof."""
    magic, key, index, proof = _HELLO.unpack(data)
    return Hello(key, index, proof) if magic == _HELLO_MAGIC else None


def is_proven(hello: Hello, secret: bytes) -> bool:
    return hmac.compare_digest(hello.proof, _proof(secret, hello.key, hello.stream, b"dial"))


def answer_to(rendezvous: Rendezvous, index: int) -> bytes:
    return _proof(rendezvous.secret, rendezvous.key, index, b"listen")


def encode_header(number: int, num_bytes: int) -> bytes:
    return _HEADER.pack(_HEADER_MAGIC, number, num_bytes)


def require_header(data: bytes, number: int, num_bytes: int) -> None:
    """Raises TransferError `bad_stream` unless the share that follows is the expected one."""
    expected = _HEADER_MAGIC, number, num_bytes
    if _HEADER.unpack(data) != expected:
        magic, found, size = _HEADER.unpack(data)
        said = f"transfer {found} with {size} bytes" if magic == _HEADER_MAGIC else f"{bytes(magic)!r}"
        message = f"the connection sent {said}, but transfer {number} with {num_bytes} bytes was ordered"
        raise TransferError("bad_stream", message)


def shares(parts: Sequence[Part], num_streams: int, chunk_bytes: int) -> list[list[list[Part]]]:
    """Split a transfer: for each connection its chunks, each of at most `chunk_bytes` bytes and MAX_PIECES parts.

    Connections get chunks in turn. Small transfers are cut finer, so that all connections have something to do.
    """
    total = sum(size for _, size in parts)
    limit = min(chunk_bytes, max(MIN_CHUNK_BYTES, -(-total // num_streams)))
    dealt: list[list[list[Part]]] = [[] for _ in range(num_streams)]
    chunk: list[Part] = []
    room, count = limit, 0
    for offset, size in parts:
        end = offset + size
        while offset < end:
            piece = min(end - offset, room)
            chunk.append((offset, piece))
            offset += piece
            room -= piece
            # A chunk is one system call: half of the 1,024 pieces that the kernel takes are enough.
            if not room or len(chunk) == MAX_PIECES:
                dealt[count % num_streams].append(chunk)
                chunk, room, count = [], limit, count + 1
    if chunk:
        dealt[count % num_streams].append(chunk)
    return dealt


def num_bytes_of(chunks: Sequence[Sequence[Part]]) -> int:
    return sum(size for chunk in chunks for _, size in chunk)


def _proof(secret: bytes, key: bytes, index: int, role: bytes) -> bytes:
    # With the number in the data and the role in `person`, neither end's proof can be sent back to it as the other's.
    data = key + index.to_bytes(4, "little")
    return hashlib.blake2b(data, digest_size=ANSWER_BYTES, key=secret, person=role).digest()
