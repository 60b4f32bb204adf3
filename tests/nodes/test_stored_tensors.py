"""Which tensors of a folder are a model's head and embedding: told by the names in its files, as in transformers 5."""

import json
from pathlib import Path

import pytest

from nodes.model_spec import ModelDamaged, ModelSpec, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from tests.nodes.checkpoints import LLAMA, fake_spec, write_model, write_safetensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_tensors(directory: Path, *, tied: bool, leaves_out: str = "", **extra: tuple[int, ...]) -> ModelSpec:
    """A Llama with both head and embedding, less what is left out."""
    write_model(directory, LLAMA | {"tie_word_embeddings": tied})
    shapes = expected_shapes(fake_spec(LLAMA | {"tie_word_embeddings": False})) | extra
    write_safetensors(directory / "model.safetensors", {name: shapes[name] for name in shapes if name != leaves_out})
    return resolve_model(str(directory))


def test_a_head_that_is_stored_is_used_whatever_the_flag_says(tmp_path: Path) -> None:
    spec = with_tensors(tmp_path / "both", tied=True)
    assert not spec.tie_word_embeddings
    assert HEAD in expected_shapes(spec)
    # 300 rows of 16 float32.
    (note,) = spec.notes
    assert note.startswith("both has a head beside its embedding")
    assert "takes 19.2 kB as stored" in note
    plain = with_tensors(tmp_path / "plain", tied=False)
    assert not plain.notes
    assert spec.fingerprint == plain.fingerprint, "the same model"


def test_one_of_the_two_serves_as_both_if_the_flag_says_so(tmp_path: Path) -> None:
    specs = [with_tensors(tmp_path / name, tied=True, leaves_out=name) for name in (HEAD, EMBEDDING)]
    assert [spec.tie_word_embeddings for spec in specs] == [True, True]
    assert not any(spec.notes for spec in specs)
    assert specs[0].fingerprint != specs[1].fingerprint
    for name in (HEAD, EMBEDDING):
        with pytest.raises(ModelDamaged, match=f"no tensor '{name}'"):
            with_tensors(tmp_path / "m", tied=False, leaves_out=name)


def test_a_head_of_another_shape_is_refused_in_any_place(tmp_path: Path) -> None:
    shape = {HEAD: (301, 16)}
    for leaves_out in ("", EMBEDDING):
        with pytest.raises(ModelDamaged, match=rf"'{HEAD}' has shape \[301, 16\]"):
            with_tensors(tmp_path / "m", tied=True, leaves_out=leaves_out, **shape)


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    """As embedding models are published, whose tensors have names without a prefix."""
    directory = write_model(tmp_path, LLAMA)
    plain = resolve_model(str(directory))
    shapes = {name.removeprefix("model."): shape for name, shape in expected_shapes(plain).items()}
    write_safetensors(directory / "model.safetensors", shapes)
    spec = resolve_model(str(directory))
    assert spec.tie_word_embeddings
    assert spec.shape_digest() == plain.shape_digest()
    write_safetensors(directory / "model.safetensors", shapes | {HEAD: (300, 16)})
    assert not resolve_model(str(directory)).tie_word_embeddings
    del shapes["layers.1.mlp.up_proj.weight"]
    write_safetensors(directory / "model.safetensors", shapes)
    with pytest.raises(ModelDamaged, match=r"no tensor 'layers\.1\.mlp\.up_proj\.weight'"):
        resolve_model(str(directory))


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {"a": "w.safetensors"}}', '{"weight_map": {"a": "gone.safetensors"}}', "{}"],
    ids=["complete", "stale", "damaged"],
)
def test_a_single_file_is_read_whatever_an_index_beside_it_names(tmp_path: Path, index: str) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    plain = resolve_model(str(directory))
    write_safetensors(directory / "w.safetensors", expected_shapes(plain), fill=1)
    (directory / "model.safetensors.index.json").write_text(index)
    spec = resolve_model(str(directory))
    assert (spec.weight_files, spec.fingerprint) == (plain.weight_files, plain.fingerprint)
    assert spec.notes == (
        "m has model.safetensors, so model.safetensors.index.json and the files that it names are not read",
    )


def test_an_index_may_spell_a_name_otherwise(tmp_path: Path) -> None:
    directory = write_model(tmp_path, LLAMA)
    weight_map = {"a": "./w.safetensors", "b": "w.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").rename(directory / "w.safetensors")
    assert resolve_model(str(directory)).weight_files == (str(directory / "w.safetensors"),)
    (directory / "w.safetensors").rename(directory / "model.safetensors")
    weight_map = {"a": "./model.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert resolve_model(str(directory)).notes == (), "nothing else is named"
