"""Paths that cannot be models: each is a typed error that names the path, whoever asks."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.model_spec import ModelDamaged, ModelNotFound, ModelUnsupported, resolve_model
from tests.nodes.checkpoints import LLAMA, write_model


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """As a user whom modes bind."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o000, 0o311, 0o644])
@pytest.mark.parametrize("where", ["model", "parent"])
def test_what_may_not_be_read_is_named(where: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        directory = write_model(Path(root) / "parent" / "model", LLAMA)
        closed = directory if where == "model" else directory.parent
        closed.chmod(mode)
        try:
            with without_rights():
                if (where, mode) == ("parent", 0o311):
                    assert resolve_model(str(directory)).name == "model"
                    return
                words = f"{directory}.* cannot be read: Permission denied"
                with pytest.raises(ModelDamaged if mode == 0o644 and where == "model" else ModelNotFound, match=words):
                    resolve_model(str(directory))
        finally:
            closed.chmod(0o755)


@pytest.mark.parametrize("length", [300, 5000])
def test_names_that_no_file_may_have(length: int) -> None:
    with pytest.raises(ModelNotFound, match="a' cannot be read: File name too long"):
        resolve_model("a" * length)


def test_a_shard_with_such_a_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path, LLAMA)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "%s"}}' % ("a" * 300))
    with pytest.raises(ModelNotFound, match="a' cannot be read: File name too long"):
        resolve_model(str(directory))


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    directory = write_model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff")), LLAMA)
    with pytest.raises(ModelUnsupported, match=r"directory '.*/m\\udcff' is not UTF-8"):
        resolve_model(str(directory))


def test_the_home_of_nobody() -> None:
    with pytest.raises(ModelNotFound, match="no model directory '~nobody-of-that-name/m'"):
        resolve_model("~nobody-of-that-name/m")
