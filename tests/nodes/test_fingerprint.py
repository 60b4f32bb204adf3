"""What names a model's KV: every byte of its weights, wherever they lie, and nothing that changed while it was read."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import TransferError
from kvstore.layout import KVLayout
from kvstore.protocol import OpenGrant, PagesReady, TransferFailed
from kvstore.store.installed.identity import digest_of
from kvstore.store.place import StoreIdentity
from kvstore.transfer.plan import HeadSlice, head_copies
from kvstore.transfer.session import Announced, Send, TransferSession
from mesh.runtime.effects import Refuse
from nodes.model_spec import ModelNotFound, WeightsChanged, describe_model, file_hash, resolve_model
from nodes.model_spec.file_hash import FileHasher, state_of
from nodes.model_spec.fingerprint import UNREAD, WeightsReader, files_of, require_unchanged, with_known_fingerprint
from nodes.model_spec.weight_index import expected_shapes, read_header
from nodes.models.spec import ModelSpec
from nodes.numerics import Bits
from nodes.protocol import JoinGroup
from nodes.worker.parallel.ranks import RankRendezvous
from tests.nodes.checkpoints import LLAMA, write_model, write_modules, write_safetensors

QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 5}


class Changed:
    """A model of several files whose single bytes are changed, and its fingerprint as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_model(folder, QWEN3)
        single = self.folder / "model.safetensors"
        shapes = expected_shapes(describe_model(str(self.folder)))
        names = sorted(shapes)
        parts = {f"model-0000{n}-of-00003.safetensors": names[n - 1 :: 3] for n in (1, 2, 3)}
        for file, part in parts.items():
            write_safetensors(self.folder / file, {name: shapes[name] for name in part}, fill=7)
        single.unlink()
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (self.folder / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
        self.places = {
            name: (self.folder / file, entry.data_offsets)
            for file in parts
            for name, entry in read_header(self.folder / file).items()
        }
        self.spec = resolve_model(str(self.folder))

    def other(self, name: str, number: int, bit: int) -> ModelSpec:
        """With one bit of one of a tensor's numbers changed; afterwards the file is as before."""
        file, (begin, end) = self.places[name]
        data = file.read_bytes()
        at = len(data) - self._data_bytes(file) + begin + number % (end - begin)
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([data[at] ^ 1 << bit]))
            opened.flush()
            try:
                return resolve_model(str(self.folder))
            finally:
                opened.seek(at)
                opened.write(data[at : at + 1])

    def _data_bytes(self, file: Path) -> int:
        return max(entry.data_offsets[1] for entry in read_header(file).values())


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return Changed(tmp_path_factory.mktemp("model") / "m")


def identity_of(layout: KVLayout) -> StoreIdentity:
    return StoreIdentity(host="h", layout_digest=layout.digest, page_bytes=layout.page_bytes, numerics="same")


def refused_grant(ours: KVLayout, theirs: KVLayout) -> str:
    """The code with which a grant's transfer of pages of `theirs` ends."""
    grant = OpenGrant(
        grant_id="g", group="d", pages=[1], generations=[1], layout_digest=ours.digest, holder="s", holder_epoch=1,
        timeout_s=9.0,
    )  # fmt: skip
    ready = PagesReady(
        grant_id="g", first=0, total=1, source_group="p", source_agent="a", source_incarnation=1,
        layout_digest=theirs.digest, pages=[1], generations=[1],
    )  # fmt: skip
    commands = TransferSession(grant, 0.0).handle(Announced("p", 1, ready), 0.0)
    told = [one.message for one in commands if isinstance(one, Send)]
    return next((message.code for message in told if isinstance(message, TransferFailed)), "")


@given(st.data())
@settings(max_examples=200)
def test_one_bit_of_any_number_is_another_model_on_every_way_that_pages_travel(
    changed: Changed, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(changed.places)))
    spec, other = changed.spec, changed.other(name, data.draw(st.integers(0, 1 << 20)), data.draw(st.integers(0, 7)))
    assert other.fingerprint != spec.fingerprint
    assert other.shape_digest() == spec.shape_digest()
    ours, theirs = spec.kv_layout(), other.kv_layout()
    # Pools, grants and moves.
    assert ours.digest != theirs.digest
    assert refused_grant(ours, theirs) == "layout_mismatch"
    assert refused_grant(ours, spec.kv_layout()) == ""
    with pytest.raises(TransferError, match="differ in fingerprint"):
        head_copies(ours, theirs, HeadSlice(0, 0, 0, 1))
    assert Bits(ours.fingerprint, "same") != Bits(theirs.fingerprint, "same")
    # Stores.
    assert identity_of(ours).folder != identity_of(theirs).folder
    assert digest_of(identity_of(ours)) != digest_of(identity_of(theirs))
    # Ranks.
    own = JoinGroup(group="g", rank=0, size=2, model=spec.fingerprint, incarnation=1)
    (refusal,) = RankRendezvous(own, 1, b"").join(
        msgspec.structs.replace(own, rank=1, model=other.fingerprint), 1, None
    )
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.retryable) == ("group_mismatch", False)


def test_the_same_bytes_in_another_place_are_the_same_model(changed: Changed, tmp_path: Path) -> None:
    moved = tmp_path / "renamed"
    moved.mkdir()
    for file in changed.folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert resolve_model(str(moved)).fingerprint == changed.spec.fingerprint


def test_the_hash_is_that_of_pieces_whoever_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(file_hash, "_BUFFER_BYTES", 300)
    for size in (0, 1, 999, 1000, 1001, 54_321):
        data = os.urandom(size)
        (tmp_path / "f").write_bytes(data)
        pieces = b"".join(hashlib.sha256(data[at : at + 1000]).digest() for at in range(0, size, 1000))
        expected = hashlib.sha256(b"kvmesh file 1" + size.to_bytes(8, "little") + pieces).digest()
        for most in (1, 7):
            monkeypatch.setattr(file_hash, "_MOST_THREADS", most)
            with FileHasher() as hasher:
                assert hasher.hash(str(tmp_path / "f")).digest == expected


def overwrite(file: Path) -> None:
    """In place, and with its time of change set back, as some tools do."""
    before, times = state_of(str(file)), file.stat()
    # Until the kernel's clock has ticked, for the time that nobody can set.
    while state_of(str(file)) == before:
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"x")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def put_another(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes()[:-1] + b"x")
    other.replace(file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1500)


CHANGES: list[Callable[[Path], None]] = [overwrite, put_another, cut]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(file_hash, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(file_hash, "_MOST_THREADS", 1)
    spec = describe_model(str(write_model(tmp_path / "m", LLAMA)))
    told = list[tuple[int, int]]()

    def tell(done: int, size: int) -> None:
        told.append((done, size))
        if len(told) == 1:
            change(Path(spec.weight_files[0]))

    with pytest.raises(WeightsChanged, match="was changed while it was read"):
        WeightsReader(tell).read(spec)
    if change is not cut:
        size = Path(spec.weight_files[0]).stat().st_size
        assert told[-1] == (size, size)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_between_hashing_and_loading_is_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    spec = resolve_model(str(write_model(tmp_path / "m", LLAMA)))
    require_unchanged(spec)
    change(Path(spec.weight_files[0]))
    with pytest.raises(WeightsChanged, match="while they were loaded"):
        require_unchanged(spec)


def test_what_another_process_read_counts_for_files_in_the_same_state_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", LLAMA)
    spec = resolve_model(str(folder))
    assert spec.weights is not None
    assert not spec.weights.is_settled, "it is a moment old, and may change again in the same tick of the clock"
    claimed = msgspec.structs.replace(spec.weights, digest="claimed")
    assert resolve_model(str(folder), known=claimed) == spec, "hashed again"
    settled = msgspec.structs.replace(claimed, is_settled=True)
    assert resolve_model(str(folder), known=settled).fingerprint.endswith("-claimed")
    put_another(folder / "model.safetensors")
    other = resolve_model(str(folder), known=settled)
    assert not other.fingerprint.endswith("-claimed")
    assert other.fingerprint != spec.fingerprint


def test_products_behind_the_pooling_are_part_of_it(tmp_path: Path) -> None:
    write_modules(
        write_model(tmp_path, LLAMA), ("Pooling", {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}),
        ("Dense", {"in_features": 16, "out_features": 8}),
    )  # fmt: skip
    spec = resolve_model(str(tmp_path))
    beside = tmp_path / "2_Dense" / "model.safetensors"
    assert files_of(spec) == (*spec.weight_files, str(beside))
    overwrite(beside)
    assert resolve_model(str(tmp_path)).fingerprint != spec.fingerprint
    with pytest.raises(WeightsChanged):
        require_unchanged(spec)


def test_models_without_files_need_no_reading() -> None:
    for name in ("echo", "random:tiny-llama"):
        assert with_known_fingerprint(describe_model(name)) == resolve_model(name)
        assert resolve_model(name).weights is None
        require_unchanged(resolve_model(name))


def test_who_starts_nothing_reads_nothing(tmp_path: Path) -> None:
    spec = describe_model(str(write_model(tmp_path / "m", LLAMA)))
    assert spec.fingerprint == ""
    assert with_known_fingerprint(spec).fingerprint == f"{spec.shape_digest().hex()}-{UNREAD}"


def test_reading_ends_early_when_it_is_told_to(tmp_path: Path) -> None:
    spec = describe_model(str(write_model(tmp_path / "m", LLAMA)))
    for stops_first in (True, False):
        reader = WeightsReader()
        if stops_first:
            reader.stop()
        else:
            with FileHasher() as hasher:
                hasher.stop()
                with pytest.raises(InterruptedError):
                    hasher.hash(spec.weight_files[0])
            continue
        with pytest.raises(InterruptedError):
            reader.read(spec)
    assert not [one for one in threading.enumerate() if one.name.startswith("hash")]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    spec = describe_model(str(write_model(tmp_path / "m", LLAMA)))
    Path(spec.weight_files[0]).unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors cannot be read: No such file"):
        WeightsReader().read(spec)
