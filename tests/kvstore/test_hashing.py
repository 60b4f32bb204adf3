from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hashing import HASH_BYTES, chain_hashes, pack_tokens, page_hash, root_hash, unpack_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS)
def test_packed_tokens_come_back(token_ids: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(token_ids))) == token_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_ids_in_an_array_are_packed_as_those_in_a_list(token_ids: list[int]) -> None:
    if min(token_ids, default=0) < 0:
        with pytest.raises(ValueError, match="token ids must be integers"):
            pack_tokens(array("i", token_ids))
    else:
        assert pack_tokens(array("i", token_ids)) == pack_tokens(token_ids)


@pytest.mark.parametrize("token_ids", [[-1], [2**32], ["a"], [1.5]])
def test_impossible_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        pack_tokens(token_ids)


@given(TOKENS, st.integers(1, 8))
def test_chain_names_every_full_page_and_all_before_it(token_ids: list[int], page_size: int) -> None:
    root = root_hash("salt")
    hashes = chain_hashes(root, token_ids, page_size)
    assert len(hashes) == len(token_ids) // page_size
    assert len(set(hashes)) == len(hashes)
    parent = root
    for index, value in enumerate(hashes):
        assert len(value) == HASH_BYTES
        assert value == page_hash(parent, pack_tokens(token_ids[index * page_size : (index + 1) * page_size]))
        parent = value
    if hashes:
        changed = [(token_ids[0] + 1) % 2**32, *token_ids[1:]]
        assert not set(chain_hashes(root, changed, page_size)) & set(hashes)


def test_roots_differ_by_extra_key() -> None:
    roots = [root_hash(), root_hash("a"), root_hash("ab"), root_hash("a\0"), root_hash("\0"), root_hash("a\ud800")]
    assert len(set(roots)) == len(roots)


def test_hashes_are_stable() -> None:
    """They are written into page tables and cross hosts: a change of the function is a change of format."""
    assert root_hash().hex() == "f860a333731ca15da94b38bd89d298f0"
    assert root_hash("salt").hex() == "6f317b3922681e3cae57021998c521bc"
    assert [value.hex() for value in chain_hashes(root_hash(), [1, 2, 3, 4], 2)] == [
        "8be3f516554c092f867257ff5a998f31",
        "5af3119012261fde90b9e4766331be17",
    ]
