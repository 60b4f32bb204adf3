"""Where an actor listens: ipc in its run directory, tcp on an interface of its host, or both on the same ROUTERs.

    a mesh of one host      ipc                  all actors dial it
    a mesh of hosts         ipc and tcp          actors on the same host dial ipc, so that links within a host survive
                                                 a network failure; the others dial tcp

Used by `mesh/transport/zeromq.py`, which owns the sockets; the program that runs an actor makes the options.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from mesh.address import Address, Endpoint
from mesh.errors import BindError
from mesh.membership.keys import HostKey
from mesh.membership.view import Member
from mesh.options import MAX_PEERS
from mesh.runtime.key_files import KeyDirectory, KeyFileError, KeyRing
from mesh.runtime.run_directory import RunDirectory
from mesh.transport.base import Channel
from mesh.transport.zeromq_zap import ZAP_DOMAIN
from mesh.wire.header import Limits

_HEARTBEAT_MS: Final = 500
"""As actors' own heartbeats (`heartbeat_s`)."""
_SILENCE_MS: Final = 1500
"""A host whose packets are lost is missed after three heartbeats, as an actor is; with 1000 and 3000 it took 5.8 s."""
_PROBE_S: Final = 1
"""How long the kernel waits before it probes a silent connection, and between probes; whole seconds."""
_TCP: Final = "tcp://"


@dataclass(frozen=True)
class ZeroMQOptions:
    """Where to listen, and how much may wait.

    At least one of `run_directory` (ipc) and `bind` (tcp: an IP address of this host, `0.0.0.0` and `::` for all) is
    given. `address` is the IP address or name that other hosts dial, if that is not `bind`. `port` is the control
    channel's; the data channel has the next one. 0: any free ports, within `ports` (first and last) if given.
    `insecure` allows tcp beyond the loopback interface without keys; with `keys` everything over tcp is encrypted, and
    connections without an allowed key are rejected.
    """

    run_directory: RunDirectory | None = None
    bind: str = ""
    address: str = ""
    port: int = 0
    ports: tuple[int, int] | None = None
    insecure: bool = False
    keys: KeyRing | None = None
    limits: Limits = field(default_factory=Limits)
    max_peers: int = MAX_PEERS
    high_water_mark: int = 1000
    max_outbox_messages: int = 4096
    max_outbox_bytes: int = 128 << 20
    handshake_timeout_s: float = 2.0

    @classmethod
    def of_host(cls, run_directory: RunDirectory, port: int = 0) -> "ZeroMQOptions":
        """How an actor of a run directory listens: on ipc, and on tcp if `host.json` says so. Raises `BindError`."""
        host = run_directory.host()
        if host is None:
            return cls(run_directory=run_directory)
        try:
            keys = KeyRing(KeyDirectory(Path(host.keys))) if host.keys else None
        except KeyFileError as error:
            raise BindError(f"the keys for tcp on {host.bind} cannot be used: {error.message}") from error
        return cls(run_directory, host.bind, host.address, port, host.ports, host.insecure, keys)

    @property
    def vet_host(self) -> Callable[[Member], None] | None:
        """For `SystemOptions.vet_host`: which members the keys allow; None without keys."""
        return None if self.keys is None else self.keys.vet


class Bound(NamedTuple):
    """Where one channel listens, on tcp (as others dial it) and on ipc; "" if it does not."""

    tcp: str
    ipc: str


def bind(router: "zmq.Socket[bytes]", options: ZeroMQOptions, address: Address, channel: Channel) -> Bound:
    """Bind one channel's socket wherever the options say. Raises `BindError`, leaving no file behind."""
    tcp = ipc = ""
    if options.keys is not None:
        # Every connection is vetted, ipc included: reading the User-Id of a frame that has none costs an exception.
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if options.bind:
        if options.keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, options.keys.own.secret_key.encode())
        elif not options.insecure and not _is_loopback(options.bind):
            raise BindError(
                f"tcp on {options.bind} would be open to the network, and messages without keys are neither encrypted "
                "nor authenticated: make keys with `meshctl keys new`, listen on 127.0.0.1, or set `insecure` if the "
                "network is trusted"
            )
        _expect_packets(router)
        router.setsockopt(zmq.IPV6, int(":" in options.bind))
        tcp = _bind_tcp(router, options, channel)
        if options.address:
            tcp = f"{_TCP}{_in_url(options.address)}:{tcp.rpartition(':')[2]}"
    if options.run_directory is not None:
        # Each endpoint gets the options that the socket has at the time of the bind.
        if options.keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 0)
        ipc = _bind(router, _ipc(options.run_directory, address, channel))
    return Bound(tcp, ipc)


def how_to_be_allowed(options: ZeroMQOptions) -> str:
    """What to type, and where, for other hosts to accept this host's key; "" if it has none."""
    if options.keys is None:
        return ""
    own, head = options.keys.own, options.keys.allowed.registry().host
    mesh = f" --name {options.run_directory.mesh}" if options.run_directory is not None else ""
    return f"on host {head}: `meshctl keys add {own.host} '{own.public_key}'{mesh}`"


def endpoint_of(control: Bound, data: Bound) -> Endpoint:
    if control.tcp:
        return Endpoint(control.tcp, data.tcp, control.ipc, data.ipc)
    return Endpoint(control.ipc, data.ipc)


def prepare_dial(dealer: "zmq.Socket[bytes]", where: str, keys: HostKey | None, server_key: bytes) -> None:
    """Set a socket's options before it dials `where`; with `keys`, the listener there must have `server_key`."""
    if is_far(where):
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
        _expect_packets(dealer)
        _send_heartbeats(dealer)
        dealer.setsockopt(zmq.IPV6, int(where.startswith(f"{_TCP}[")))


def is_far(where: str) -> bool:
    return where.startswith(_TCP)


def _expect_packets(socket: "zmq.Socket[bytes]") -> None:
    """Have connections made from now on end about 2 s after the other end's kernel falls silent."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_S)
    # Also bounds the wait for acknowledgement of sent data, and replaces the number of probes.
    socket.setsockopt(zmq.TCP_MAXRT, _SILENCE_MS)


def _send_heartbeats(dealer: "zmq.Socket[bytes]") -> None:
    """Send heartbeats, which end the connection at both ends when either process falls silent.

    Only the dialing side does: libzmq 4.3.5 aborts the process if a heartbeat comes due on a connection that has
    ended with an error while libzmq was not reading from it because its receive queue was full. A ROUTER has such
    connections whenever its actor is held up, or when somebody takes another's routing id. So it sends none; the
    heartbeats it receives tell it how long to wait for the next. A DEALER's receive queue is unbounded.
    """
    dealer.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TTL, _SILENCE_MS)
    dealer.setsockopt(zmq.RCVHWM, 0)


def _bind_tcp(router: "zmq.Socket[bytes]", options: ZeroMQOptions, channel: Channel) -> str:
    """Bind on tcp and return the endpoint. Raises `BindError`."""
    where = f"{_TCP}{_in_url(options.bind)}"
    if options.port or options.ports is None:
        return _bind(router, f"{where}:{options.port + channel if options.port else '*'}")
    first, last = options.ports
    for port in range(first, last + 1):
        # Other actors on this host bind ports of the same range: nothing assigns them, so skip those that are taken.
        try:
            router.bind(f"{where}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise BindError(f"{where}:{port} cannot be listened on ({error}): use another address") from error
        else:
            return router.getsockopt_string(zmq.LAST_ENDPOINT)
    raise BindError(
        f"no port of {options.bind} from {first} to {last} is free: give this host more, with --ports or with `ports` "
        "in its table; each actor needs two, and two others for a moment when it restarts"
    )


def _bind(router: "zmq.Socket[bytes]", where: str) -> str:
    try:
        router.bind(where)
    except zmq.ZMQError as error:
        do = "stop what listens there, or use another port" if error.errno == zmq.EADDRINUSE else "use another address"
        raise BindError(f"{where} cannot be listened on ({error}): {do}") from error
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


def _ipc(run_directory: RunDirectory, address: Address, channel: Channel) -> str:
    path = run_directory.socket(address, channel)
    if path.exists():
        raise BindError(
            f"{path} exists: epoch {address.epoch} of {address.actor_id} is running or was not cleaned up; "
            "start it with a new epoch"
        )
    return f"ipc://{path}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
