import pytest

from kvstore.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16", page_size=4, fingerprint="w")


def test_sizes() -> None:
    assert LAYOUT.page_shape == (2, 2, 4, 3, 8)
    assert LAYOUT.token_bytes == 2 * 2 * 3 * 8 * 2
    assert LAYOUT.page_bytes == 4 * LAYOUT.token_bytes
    assert [LAYOUT.num_pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size", "tp_size", "format_version"])
def test_every_field_is_in_the_digest(field: str) -> None:
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    assert KVLayout(**fields).digest == LAYOUT.digest
    assert len(LAYOUT.digest) == 16
    assert KVLayout(**(fields | {field: fields[field] + 1})).digest != LAYOUT.digest
    assert KVLayout(**(fields | {"fingerprint": "other"})).digest != LAYOUT.digest
    assert KVLayout(**(fields | {"dtype": "float16"})).digest != LAYOUT.digest


def test_ranks_of_one_model_exchange_pages_however_they_share_its_heads() -> None:
    whole = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, fingerprint="w")
    halves = [KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, fingerprint="w", tp_rank=r, tp_size=2) for r in (0, 1)]
    shared = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, fingerprint="w", tp_size=8, total_kv_heads=4)
    dealt = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, fingerprint="w", tp_size=8)
    assert {one.digest for one in (*halves, shared)} == {whole.digest}
    assert dealt.digest != whole.digest
    assert (shared.model_kv_heads, dealt.model_kv_heads) == (4, 8)
    assert whole.digest.hex() == "80d5fae1d09949154b8887837666c8b8", "older agents compare it"
