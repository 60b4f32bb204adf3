"""Building an NCCL for two ranks on a device: what is refused, how make is called, what is said at the end."""

import os
from pathlib import Path

import pytest

from tools import build_nccl
from tools.build_nccl import BuildError, command, version_of

MAKE = """#!/bin/sh
echo "$@" > "$(dirname "$0")/said"
for word in "$@"; do case "$word" in BUILDDIR=*) out="${word#BUILDDIR=}";; esac; done
[ -n "$FAKE_FAILS" ] && exit 2
[ -n "$FAKE_MAKES_NOTHING" ] && exit 0
mkdir -p "$out/lib" && touch "$out/lib/libnccl.so.2"
"""


def tree(folder: Path, version: str = "2.30.7") -> Path:
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (folder / "makefiles").mkdir(parents=True)
    text = "".join(f"NCCL_{name}   := {number}\n" for name, number in parts)
    (folder / "makefiles" / "version.mk").write_text(text)
    return folder


def test_versions_that_do_not_take_two_ranks_are_refused(tmp_path: Path) -> None:
    assert version_of(tree(tmp_path / "new")) == (2, 30, 7)
    assert version_of(tree(tmp_path / "newer", "3.0.0")) == (3, 0, 0)
    with pytest.raises(BuildError, match=r"2\.29\.7: two ranks on one device need 2\.30"):
        version_of(tree(tmp_path / "old", "2.29.7"))
    with pytest.raises(BuildError, match="is not an NCCL source tree"):
        version_of(tmp_path)


def test_make_is_asked_for_one_architecture_and_few_functions() -> None:
    words = command(Path("/s"), Path("/o"), 90, "SendRecv", 3, Path("/c"))
    assert words[:5] == ["make", "-C", "/s", "-j3", "src.build"]
    assert "NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90" in words
    assert "ONLY_FUNCS=SendRecv" in words
    assert "CUDA_HOME=/c" in words


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose make only says that it was called."""
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    monkeypatch.setenv("PATH", f"{make.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", "/somewhere/cuda")
    return tree(tmp_path / "nccl")


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["build_nccl", *map(str, words)])
    return build_nccl.main()


def test_the_library_is_named_to_the_tests(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, host, "--out", tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (f"export {build_nccl.VARIABLE}={tmp_path}/out/lib/libnccl.so.2")
    assert "CUDA_HOME=/somewhere/cuda" in (tmp_path / "bin" / "said").read_text()


@pytest.mark.parametrize(
    ("variable", "said"), [("FAKE_FAILS", "make exited with 2"), ("FAKE_MAKES_NOTHING", "does not exist")]
)
def test_a_build_that_fails_says_so(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable, said
) -> None:
    monkeypatch.setenv(variable, "1")
    assert run(monkeypatch, host, "--out", tmp_path / "out") == 1
    assert said in capsys.readouterr().err


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match="no nvcc"):
        build_nccl.cuda_home()
