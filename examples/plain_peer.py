"""A custom actor from ZeroMQ and MessagePack alone: it imports nothing of kvmesh, and follows `docs/protocol.md`.

It joins the mesh that runs on this host, asks a tokenizer two things, and answers `CountWords` with `WordsCounted`
until SIGTERM or SIGINT. A peer in any other language has to do the same.

    python examples/plain_peer.py [--name MESH] [--actor-id ID]
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

HELLO, WELCOME, TELL, ASK, REPLY, ERROR = 1, 2, 3, 4, 5, 6
HEARTBEAT, BYE = 12, 16
CONTROL, DATA = 0, 1
VERSION = 7  # of the protocol
SYSTEM = 1  # flag: a body of the system, not of the actors' own protocol
SILENCE_S = 1.5  # three heartbeats
REFUSALS = ("superseded", "no_proof", "bad_proof", "too_many_peers")  # of an incarnation, for which retrying is no use
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


class Connection:
    """One connection with a peer, dialed by either side: two channels, each numbered from 1 in both directions."""

    def __init__(self, number: int, peer: tuple[str, int], name: bytes = b"") -> None:
        self.number = number
        self.peer = peer
        self.name = name  # the routing id of an accepted connection, which no other one has
        self.sent = [0, 0]
        self.heard = [0, 0]
        self.dealers: list[zmq.Socket] = []  # of a dialed connection; an accepted one is answered through the ROUTERs


class PlainPeer:
    """One incarnation of one actor; `service` answers the asks that it gets."""

    def __init__(self, directory: Path, actor_id: str, epoch: int, service: "Words") -> None:
        self.directory = directory
        self.actor_id, self.epoch = actor_id, epoch
        self.service = service
        self.context = zmq.Context()
        self.routers = []
        self.ids = itertools.count(1)
        self.numbers = itertools.count(1)
        self.accepted: dict[bytes, Connection] = {}
        self.dialed: dict[tuple[str, int], Connection] = {}
        self.answers: dict[int, tuple[int, dict] | None] = {}  # by message id of our ask; None until it comes
        self.members: dict[str, dict] = {}
        self.view = (0, 0)  # epoch of the registry, version of its list
        self.registry = ("", 0)
        self.answered_at = 0.0
        endpoints = []
        for channel in "cd":
            path = directory / "s" / f"{actor_id}.{epoch}.{channel}"
            router = self.context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.bind(f"ipc://{path}")
            self.routers.append(router)
            endpoints.append(f"ipc://{path}")
        self.member = {
            "actor_id": actor_id,
            "role": "custom",
            "epoch": epoch,
            "endpoint": endpoints,
            "state": "ready",
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    # Called from outside

    def join(self) -> None:
        """Become a member, or become one again after a restart of the registry; learn the other members."""
        where = json.loads((self.directory / "registry.json").read_bytes())
        registry = (where["actor_id"], where["epoch"])
        for peer in [peer for peer in self.dialed if peer[0] == registry[0]]:
            self.forget(peer)  # an earlier epoch of the registry, or a connection that it does not know
        self.registry = registry
        self.dial(registry, (where["control"], where["data"]))
        join = {"type": "Join", "member": self.member, "known_members": list(self.members.values())}
        joined = self.ask(registry, join, system=True)
        self.members = {member["actor_id"]: member for member in joined["members"]}
        self.view = (joined["registry_epoch"], joined["version"])
        self.answered_at = time.monotonic()

    def dial(self, peer: tuple[str, int], endpoint: tuple[str, str]) -> None:
        """Connect both channels and say hello on each. Messages after the hello need not wait for the welcome."""
        connection = self.dialed[peer] = Connection(next(self.numbers), peer)
        name = f"{self.actor_id}#{self.epoch}#{os.urandom(8).hex()}".encode()  # a new one for each connection
        for channel in (CONTROL, DATA):
            dealer = self.context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 100)
            dealer.setsockopt(zmq.RECONNECT_IVL, 86_400_000)  # never reconnect silently
            dealer.setsockopt(zmq.ROUTING_ID, name)
            dealer.connect(endpoint[channel])
            connection.dealers.append(dealer)
            hello = {"type": "Hello", "min_version": VERSION, "max_version": VERSION, "member": self.member}
            self.send(connection, channel, HELLO, hello, system=True)

    def ask(self, peer: tuple[str, int], body: dict, *, timeout_s: float = 5.0, system: bool = False) -> dict:
        """Ask and wait, answering others meanwhile; raises TimeoutError, or RuntimeError with the peer's error."""
        deadline = time.monotonic() + timeout_s
        number = self.send(self.dialed[peer], CONTROL, ASK, body, timeout_us=int(timeout_s * 1e6), system=system)
        self.answers[number] = None
        try:
            is_late = False
            while self.answers[number] is None and not is_late:
                # The clock first: after this process was held up, the time is over but the answer may be here.
                is_late = time.monotonic() >= deadline
                self.turn(0.1)
        finally:
            found = self.answers.pop(number)
        if found is None:
            raise TimeoutError(f"{peer[0]} did not answer {body['type']} within {timeout_s:g} s")
        verb, answer = found
        if verb == ERROR:
            raise RuntimeError(f"{peer[0]} answered {answer['code']}: {answer['message']}")
        return answer

    def find(self, role: str) -> tuple[str, int]:
        """The first ready member of a role, dialed."""
        for member in self.members.values():
            if member["role"] == role and member["state"] == "ready":
                peer = (member["actor_id"], member["epoch"])
                if peer not in self.dialed:
                    self.dial(peer, member["endpoint"])
                return peer
        raise LookupError(f"no {role} is ready")

    def serve(self, is_wanted: Callable[[], bool]) -> None:
        """Renew the lease every 0.5 s, follow the registry through its restarts, and answer, while `is_wanted()`."""
        renew_at = 0.0
        while is_wanted():
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + 0.5
                if self.must_join():
                    try:
                        self.join()
                    except (TimeoutError, OSError, ValueError, KeyError):
                        continue  # the registry is not up yet; the mesh goes on without it, and so does this peer
                self.send(self.dialed[self.registry], CONTROL, HEARTBEAT, {"type": "Renew"}, system=True)
            self.turn(0.1)

    def leave(self) -> None:
        """End the membership, say bye on every channel, remove the sockets' files."""
        body = {"type": "Leave", "actor_id": self.actor_id, "epoch": self.epoch, "reason": "stopped"}
        with contextlib.suppress(TimeoutError, RuntimeError, KeyError):  # then its lease runs out
            self.ask(self.registry, body, timeout_s=1.0, system=True)
        for connection in (*self.dialed.values(), *self.accepted.values()):
            for channel in (CONTROL, DATA):
                self.send(connection, channel, BYE, {"type": "Bye"}, system=True)
        for peer in list(self.dialed):
            self.forget(peer)
        for router, channel in zip(self.routers, "cd", strict=True):
            router.close()
            (self.directory / "s" / f"{self.actor_id}.{self.epoch}.{channel}").unlink(missing_ok=True)
        self.context.term()

    # Frames

    def send(
        self,
        connection: Connection,
        channel: int,
        verb: int,
        body: dict,
        *,
        correlation_id: int = 0,
        timeout_us: int = 0,
        system: bool = False,
    ) -> int:
        """Send one message and return its id; a message that the connection does not take any more is lost."""
        connection.sent[channel] += 1
        sequence = connection.number << 32 | connection.sent[channel]
        number = next(self.ids)
        header = [VERSION, verb, number, sequence, correlation_id, self.actor_id, self.epoch, connection.peer[1]]
        parts = [encode([*header, timeout_us, SYSTEM if system else 0, 0, ""]), encode(body)]
        try:
            if connection.dealers:
                connection.dealers[channel].send_multipart(parts, zmq.NOBLOCK)
            else:
                self.routers[channel].send_multipart([connection.name, *parts], zmq.NOBLOCK)
        except zmq.ZMQError:
            connection.sent[channel] -= 1
        return number

    def turn(self, wait_s: float) -> None:
        """Handle what has arrived, or wait a little for it."""
        poller = zmq.Poller()
        for router in self.routers:
            poller.register(router, zmq.POLLIN)
        for connection in self.dialed.values():
            for dealer in connection.dealers:
                poller.register(dealer, zmq.POLLIN)
        ready = dict(poller.poll(wait_s * 1000))
        for channel, router in enumerate(self.routers):
            if router in ready:
                name, *parts = router.recv_multipart()
                self.arrived(name, channel, parts)
        for connection in list(self.dialed.values()):
            for channel, dealer in enumerate(connection.dealers):
                if dealer in ready and not dealer.closed:
                    self.on_message(connection, channel, *read(dealer.recv_multipart()))

    def arrived(self, name: bytes, channel: int, parts: list[bytes]) -> None:
        """Take a message from a bound socket: hello begins a connection, and replaces the same peer's earlier one."""
        header, body = read(parts)
        if header is None or header[7] != self.epoch:
            return  # not a message of this protocol, or for another incarnation
        known = self.accepted.get(name)
        if header[1] == HELLO and (known is None or header[3] >> 32 > max(known.heard) >> 32):
            peer = (header[5], header[6])
            self.end_accepted(peer)
            known = self.accepted[name] = Connection(next(self.numbers), peer, name)
        if known is not None:
            self.on_message(known, channel, header, body)

    def on_message(self, connection: Connection, channel: int, header: list | None, body: dict) -> None:
        """Handle all verbs that a peer without topics has to know."""
        if header is None or 0 < header[3] <= connection.heard[channel]:
            return  # not a message, or one that came before
        connection.heard[channel] = max(header[3], connection.heard[channel])
        verb, number, correlation_id = header[1], header[2], header[4]
        if verb == HELLO:
            welcome = {"type": "Welcome", "version": VERSION, "member": self.member}
            self.send(connection, channel, WELCOME, welcome, correlation_id=number, system=True)
        elif verb in (REPLY, ERROR) and header[3]:
            if correlation_id in self.answers:
                self.answers[correlation_id] = (verb, body)
        elif verb == ASK:
            is_system = bool(header[9] & SYSTEM)
            answer = self.service.answer_system(body) if is_system else self.service.answer(body)
            if answer is not None:
                self.send(connection, channel, REPLY, answer, correlation_id=number, system=is_system)
            else:
                error = {"type": "ErrorBody", "code": "not_served", "message": f"no answer to {body.get('type')}"}
                self.send(connection, channel, ERROR, error, correlation_id=number, system=True)
        elif verb == TELL and body.get("type") == "MembersChanged":
            for member in body.get("upserted", ()):
                self.members[member["actor_id"]] = member
            for departed in body.get("left", ()):
                self.members.pop(departed["actor_id"], None)
                self.forget((departed["actor_id"], departed["epoch"]))
            self.view = (body["registry_epoch"], body["version"])
        elif verb == HEARTBEAT and connection.peer == self.registry:
            self.answered_at = time.monotonic()
            seen = (body.get("registry_epoch", 0), body.get("version", 0))
            if not body.get("known", True) or seen > self.view:
                self.view = (0, 0)  # the registry does not know this peer, or a change was lost: join again
        elif verb == ERROR and body.get("code") in REFUSALS and connection.peer == self.registry:
            self.forget(connection.peer)
            raise RuntimeError(f"{self.registry[0]} refuses {self.actor_id}, {body['code']}: {body.get('message')}")
        elif (verb == BYE and channel == DATA) or verb == ERROR:
            self.forget(connection.peer)

    def must_join(self) -> bool:
        """Whether to join again: the registry is a new incarnation, silent or disconnected, or the view was reset."""
        try:
            where = json.loads((self.directory / "registry.json").read_bytes())
        except (OSError, ValueError):
            return False
        is_silent = time.monotonic() - self.answered_at > SILENCE_S
        return (
            is_silent or self.view == (0, 0) or self.registry not in self.dialed or where["epoch"] != self.registry[1]
        )

    def forget(self, peer: tuple[str, int]) -> None:
        """Close the connection that was dialed to `peer`, and stop answering on the one that it has dialed."""
        self.end_accepted(peer)
        connection = self.dialed.pop(peer, None)
        for dealer in connection.dealers if connection else ():
            dealer.close()

    def end_accepted(self, peer: tuple[str, int]) -> None:
        """Stop answering on a connection that `peer` has dialed."""
        self.accepted = {name: one for name, one in self.accepted.items() if one.peer != peer}


def read(parts: list[bytes]) -> tuple[list | None, dict]:
    """Header and body; None and {} if the parts are not a message of this protocol version with a map as its body."""
    try:
        header, body = decode(parts[0]), decode(parts[1])
    except (msgspec.MsgspecError, IndexError):
        return None, {}
    if not isinstance(header, list) or len(header) < 12 or header[0] != VERSION or not isinstance(body, dict):
        return None, {}
    return header, body


class Words:
    """The service of this example."""

    def __init__(self) -> None:
        self.num_counted = 0

    def answer(self, body: dict) -> dict | None:
        """`WordsCounted` to `CountWords`; None to anything else."""
        if body.get("type") != "CountWords" or not isinstance(body.get("text"), str):
            return None
        self.num_counted += 1
        return {"type": "WordsCounted", "num_words": len(body["text"].split())}

    def answer_system(self, body: dict) -> dict | None:
        """Answer what every actor is asked: whether it is there, and its metrics (every gateway's `/metrics` asks)."""
        if body.get("type") == "Ping":
            return {"type": "Pong"}
        if body.get("type") == "StatsRequest":
            counters = {"words_counted_total": float(self.num_counted)}
            return {"type": "StatsReply", "counters": counters, "gauges": {}}
        return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=os.environ.get("KVMESH_NAME") or "default", help="name of the mesh")
    parser.add_argument("--actor-id", default="words-0")
    args = parser.parse_args()
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"kvmesh-{os.getuid()}" / args.name
    if not (base / "registry.json").exists():
        sys.exit(f"no mesh {args.name} runs here ({base} has no registry.json): start one with `meshctl up`")
    is_wanted = True

    def on_signal(number: int, frame: object) -> None:
        nonlocal is_wanted
        is_wanted = False

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    words = Words()
    # Each incarnation of an actor needs a greater epoch than the last; the clock gives one without keeping a file.
    peer = PlainPeer(base, args.actor_id, time.time_ns() // 1_000_000, words)
    try:
        peer.join()
        print(f"{args.actor_id}#{peer.epoch} has joined {', '.join(sorted(peer.members))}", flush=True)
        tokenizer = peer.find("tokenizer")
        prepare = {"type": "Prepare", "request_id": "hi", "texts": ["hi"], "add_special_tokens": False, "route": False}
        token_ids = peer.ask(tokenizer, prepare)["token_ids"][0]
        text = peer.ask(tokenizer, {"type": "Detokenize", "token_ids": token_ids})["text"]
        print(f"{tokenizer[0]} makes the tokens {token_ids} of 'hi', and {text!r} of these", flush=True)
        peer.serve(lambda: is_wanted)
    except (LookupError, TimeoutError, RuntimeError) as error:
        sys.exit(str(error))  # nobody is there or answers, or the registry refuses this incarnation
    finally:
        peer.leave()
    print(f"answered {words.num_counted}", flush=True)


if __name__ == "__main__":
    main()
