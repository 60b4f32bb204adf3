"""What names a model: a hash of its configuration and of every byte of its weights.

Equal fingerprints mean that KV pages, and whatever else is computed, mean the same; so whoever computes, or says what
is computed, has one. Not in it: names, paths, the tokenizer (pages are named by token ids). Files are hashed once for
each state that they are in (`hash_cache.py`): by who starts a mesh, which tells its workers; a worker hashes again only
if what it finds is in another state.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodes.model_spec.file_hash import FileHash, FileHasher, FileState, state_of
from nodes.model_spec.hash_cache import SETTLED_S, find_hashes, keep_hashes
from nodes.models.errors import WeightsChanged
from nodes.models.spec import ModelSpec, WeightsRead

UNREAD: Final = "unread"
"""In place of the hash of weights that were not read: for commands that start nothing."""


class WeightsReader:
    """Reads the weights of one model, perhaps in a thread beside other work.

    `told` is called with the bytes read and the bytes of all files, now and then; `stop` has a `read` that is under way
    raise InterruptedError.
    """

    def __init__(self, told: Callable[[int, int], object] = lambda _, __: None) -> None:
        self._told = told
        self._num_done = self._num_all = 0
        self._hasher: FileHasher | None = None
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        if self._hasher is not None:
            self._hasher.stop()

    def read(self, spec: ModelSpec, known: WeightsRead | None = None) -> ModelSpec:
        """`spec` with its fingerprint. `known` is what another process read; it counts if the files are as it saw them.

        Raises WeightsChanged if a file changes meanwhile, ModelNotFound, ModelDamaged.
        """
        files = files_of(spec)
        if not files:
            return spec
        states = {path: state_of(path) for path in files}
        if known is None or not known.is_settled or known.state != _digest_states(states.values()):
            known = self._read(states)
        return _named(spec, known)

    def _read(self, states: dict[str, FileState]) -> WeightsRead:
        known = find_hashes(states)
        fresh: dict[str, FileHash] = {}
        if missing := [path for path in states if path not in known]:
            self._num_all = sum(states[path].size for path in missing)
            with FileHasher(self._count) as self._hasher:
                if self._is_stopped:
                    raise InterruptedError
                fresh = {path: self._hasher.hash(path) for path in missing}
            keep_hashes(fresh)
        known |= {path: one.digest for path, one in fresh.items()}
        states = states | {path: one.state for path, one in fresh.items()}
        return WeightsRead(
            digest=hashlib.sha256(b"".join(known[path] for path in states)).hexdigest()[:32],
            state=_digest_states(states.values()),
            is_settled=all(one.age_s >= SETTLED_S for one in fresh.values()),
        )

    def _count(self, num_bytes: int) -> None:
        self._num_done = min(self._num_done + num_bytes, self._num_all)
        self._told(self._num_done, self._num_all)


def with_known_fingerprint(spec: ModelSpec) -> ModelSpec:
    """`spec` with its fingerprint as far as it is known without reading weights: else with one that no model has."""
    states = {path: state_of(path) for path in files_of(spec)}
    if len(find_hashes(states)) == len(states):
        return WeightsReader().read(spec)
    return msgspec.structs.replace(spec, fingerprint=f"{spec.shape_digest().hex()}-{UNREAD}")


def require_unchanged(spec: ModelSpec) -> None:
    """Raise WeightsChanged unless the files are as they were when they were hashed.

    Called once a model is loaded: what was loaded is then what was hashed, since a write into a file, or another one in
    its place for a while, changes its state for good.
    """
    read = spec.weights
    if read is not None and read.state != _digest_states(map(state_of, files_of(spec))):
        raise WeightsChanged(
            f"the weights of {spec.name} in {spec.path} were changed while they were loaded. Wait until they are"
            " written; to serve others, start the mesh again."
        )


def files_of(spec: ModelSpec) -> tuple[str, ...]:
    """The files with numbers that a model computes with, products behind its pooling included."""
    beside = [dense.path for dense in spec.pooling.dense if dense.path] if spec.pooling else []
    return tuple(dict.fromkeys((*spec.weight_files, *beside)))


def _named(spec: ModelSpec, read: WeightsRead) -> ModelSpec:
    return msgspec.structs.replace(spec, weights=read, fingerprint=f"{spec.shape_digest().hex()}-{read.digest}")


def _digest_states(states: Iterable[FileState]) -> str:
    return hashlib.sha256(msgspec.json.encode(list(states))).hexdigest()[:32]
