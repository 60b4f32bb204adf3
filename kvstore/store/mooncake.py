"""Keeps KV pages in a Mooncake Store: memory of several hosts as one pool, over tcp or RDMA. An installed store.

    [kv.store]
    name = "mooncake"
    key_file = "/etc/kvmesh/pool.key"    # the same on every host

What Mooncake wants to know is in a JSON file of its own, which the variable MOONCAKE_CONFIG_PATH names; it needs a
`mooncake_master` somewhere. Its ports listen on every address, and who reaches them may change values: without a key
this store is refused.

A value is got and put through memory of Mooncake's client, not through ours, although that costs a copy: a transfer
that has failed may still be writing. What it then spoils is a value, which is judged by checksum and signature.

The client gives an empty value for a key that is not there, for one whose host is gone, and while the master is. What
was meant is asked for afterwards, so that these are told apart, and none of them is a page.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol

from typing_extensions import override

from kvstore.store.installed.plugins import InstalledStore, StoreContext

_EXISTS: Final = -705
_NAMES: Final = {
    -200: "no host has room",
    -600: "refused: is it larger than local_buffer_size?",
    -800: "the host that has it, or was to have it, does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}
"""What Mooncake's numbers mean, as far as they were seen."""
_AWAY: Final = frozenset({-900, -901})
PAUSE_S: Final = 5.0
"""Of a master that is away nothing is asked for so long: each attempt to reach it takes 4.3 s (0.3.13)."""
_WAITS: Final[Mapping[str, Callable[[float], int]]] = {
    "MC_RPC_TIMEOUT_MS": lambda deadline_s: min(1250, int(deadline_s * 250)),
    "MC_TCP_STATUS_TIMEOUT_SEC": lambda deadline_s: max(1, int(deadline_s / 4)),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": lambda deadline_s: max(1, int(deadline_s / 4)),
    "MC_STORE_CLIENT_SETUP_RETRIES": lambda _: 1,
}
"""How long Mooncake waits, by its variables; a call of ours has up to three waits. Its own are 30 s, so that a master
or a host that hangs would cost calls that are given up, and four of those the store. To reach the master at the start
it tries 20 times, for 90 s, and lets no other thread of the process run meanwhile: an agent has to be heard each 0.5 s,
and is replaced when it is not for 2.5 s. One try takes 1.4 s if the master hangs, by the first of these."""
_CONNECT_S: Final = 2.0
"""In which the master has to take a connection, before anything is asked of Mooncake that would wait for it like this:
one try at a master that is not there takes 4.4 s, and the end of a client 6.2 s."""


class PoolClient(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Negative numbers are errors."""

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """1 for each key that is there, 0 for others."""
        ...

    def get_batch(self, keys: list[str], /) -> list[bytes]:
        """The values; empty where there is none, whatever the reason."""
        ...

    def get_size(self, key: str, /) -> int:
        """Bytes of a value, as the master knows it."""
        ...

    def put(self, key: str, value: memoryview, /) -> int:
        """Copies the value. 0, also if the key is there, with whatever value."""
        ...

    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]:
        """`force`: also what was read within the last ten seconds."""
        ...

    def close(self) -> int:
        """What this process gave to the pool goes with it."""
        ...


class PoolFailed(Exception):
    """Mooncake did not do it; the message says what, and why as far as its number tells."""


class MooncakeStore(InstalledStore):
    """See the module. Keys are `namespace/hash`. `clock` tells seconds; `require_master` raises OSError without one."""

    def __init__(
        self,
        client: PoolClient,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        require_master: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._require_master = require_master
        # Set and read by several threads; one that reads it too early asks once more.
        self._asked_again_at = 0.0

    @override
    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        codes = self._exist(self._keys(hashes))
        if (wrong := min(codes, default=0)) < 0:
            raise PoolFailed(_said("contains", wrong))
        return [code == 1 for code in codes]

    @override
    def get(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._require_there()
        keys = self._keys(hashes)
        there: list[bool] = []
        for value, buffer in zip(self._client.get_batch(keys), buffers, strict=True):
            # Of another length, it is judged as it is, and removed.
            length = min(len(value), len(buffer))
            buffer[:length] = value[:length]
            there.append(length > 0)
        if not all(there):
            self._explain([key for key, is_there in zip(keys, there, strict=True) if not is_there], any(there))
        return there

    @override
    def put(self, hashes: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        self._require_there()
        kept: list[bool] = []
        code = 0
        for key, value in zip(self._keys(hashes), values, strict=True):
            # Each attempt at an absent master takes seconds, so the others are not tried.
            if code not in _AWAY:
                code = self._client.put(key, value)
                self._note(code)
            kept.append(code in (0, _EXISTS))
        if not any(kept):
            raise PoolFailed(_said("put", code))
        return kept

    @override
    def remove(self, hashes: Sequence[bytes]) -> None:
        self._require_there()
        for code in self._client.batch_remove(self._keys(hashes), True):
            self._note(code)

    @override
    def close(self) -> None:
        # Without a master there is nobody to be told that what this process gave is gone.
        with contextlib.suppress(OSError):
            self._require_master()
            self._client.close()

    def _keys(self, hashes: Sequence[bytes]) -> list[str]:
        return [f"{self._namespace}/{page_hash.hex()}" for page_hash in hashes]

    def _require_there(self) -> None:
        if self._clock() < self._asked_again_at:
            raise PoolFailed(f"{_NAMES[-900]}; it is not asked again for up to {PAUSE_S:g} s")

    def _note(self, code: int) -> None:
        if code in _AWAY:
            self._asked_again_at = self._clock() + PAUSE_S

    def _exist(self, keys: list[str]) -> list[int]:
        self._require_there()
        codes = self._client.batch_is_exist(keys)
        self._note(min(codes, default=0))
        return codes

    def _explain(self, keys: list[str], are_others_there: bool) -> None:
        """Why values are empty: raises PoolFailed, unless they are not there, or others were got beside them."""
        codes = self._exist(keys)
        there = [key for key, code in zip(keys, codes, strict=True) if code == 1]
        empty = [key for key in there if self._client.get_size(key) == 0]
        if empty:
            # Put by a client that died meanwhile, say. While the key is there, no other value can be put.
            self._client.batch_remove(empty, True)
        if not are_others_there and (there or min(codes) < 0):
            why = f"{len(there)} values are there and empty, or on a host that does not answer"
            raise PoolFailed(why if there else _said("get", min(codes)))


def make(context: StoreContext) -> MooncakeStore:
    """The entry point. Whatever it raises is told as the reason for which the store cannot be made."""
    if not context.is_signed:
        raise ValueError(
            "who reaches Mooncake's ports can change values: name a key of the mesh by `key_file` of [kv.store]"
        )
    if context.options:
        raise ValueError(f"it has no options ({', '.join(context.options)}): MOONCAKE_CONFIG_PATH names its file")
    for name, of_deadline in _WAITS.items():
        os.environ.setdefault(name, str(of_deadline(context.deadline_s)))
    # Forty lines at each start otherwise, which are no warnings.
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        config: Any = import_module("mooncake.mooncake_config").MooncakeConfig.load_from_env()
        client: Any = import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'kvmesh[mooncake]', and apt install libibverbs1") from error
    require_master = partial(_require_listening, config.master_server_address)
    require_master()
    code = client.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name or "",
        config.master_server_address,
        None,
        config.enable_ssd_offload,
        config.ssd_offload_path,
        config.tenant_id,
        config.enable_client_http_server,
        config.client_http_port,
    )
    if code:
        raise ConnectionError(f"no client for the master at {config.master_server_address} ({code}): does it run?")
    return MooncakeStore(client, context.namespace, require_master=require_master)


def _require_listening(address: str) -> None:
    """Raises ConnectionError if nobody takes a connection at `host:port`. Other forms (of etcd) are not looked at."""
    host, _, port = address.rpartition(":")
    if "//" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(f"no master at {address} ({error}): start mooncake_master there") from error


def _said(what: str, code: int) -> str:
    return f"{what}: {code}, {_NAMES.get(code, 'see the master and its log')}"
