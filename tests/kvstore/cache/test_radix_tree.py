from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.cache.eviction import EvictionPolicy, FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed
from kvstore.cache.radix_tree import Node, RadixTree
from kvstore.hashing import pack_tokens, page_hash

PAGE_SIZE = 2
STRIDE = 8
ROOTS = [b"root-a", b"root-b"]
# Few tokens, so that prefixes are shared; each number is one page's content.
PATHS = st.lists(st.integers(0, 2), min_size=0, max_size=6)


def key_of(path: list[int]) -> bytes:
    return pack_tokens([token for page in path for token in (page, page + 10)])


def hashes_of(root: bytes, path: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    for index in range(len(path)):
        hashes.append(page_hash(hashes[-1] if hashes else root, key_of(path[index : index + 1])))
    return hashes


class TreeMachine(RuleBasedStateMachine):
    """Against a dictionary from (root, path) to page, with lock counts on every prefix of a locked path."""

    locks = Bundle("locks")
    policy: EvictionPolicy | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE_SIZE, self.policy)
        self.pages: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.locked: dict[tuple[bytes, tuple[int, ...]], int] = {}
        # Of cleared trees: pages that only locks keep, by lock.
        self.kept: dict[int, int] = {}
        self.next_page = 1
        self.epoch = 0

    def cached_prefix(self, root: bytes, path: list[int]) -> int:
        length = 0
        while length < len(path) and (root, tuple(path[: length + 1])) in self.pages:
            length += 1
        return length

    def add(self, root: bytes, path: list[int], start: int) -> list[int]:
        """Pages for `path`: fresh ones; the model learns those that are missing."""
        fresh = list(range(self.next_page, self.next_page + len(path) - start))
        self.next_page += len(fresh)
        for index in range(start, len(path)):
            self.pages.setdefault((root, tuple(path[: index + 1])), fresh[index - start])
        return fresh

    @rule(root=st.sampled_from(ROOTS), path=PATHS, extra=st.integers(0, STRIDE - 1))
    def match(self, root: bytes, path: list[int], extra: int) -> None:
        found = self.tree.match_prefix(root, key_of(path) + b"x" * extra)
        length = self.cached_prefix(root, path)
        assert found.pages == [self.pages[root, tuple(path[: index + 1])] for index in range(length)]

    @rule(root=st.sampled_from(ROOTS), path=PATHS)
    def insert(self, root: bytes, path: list[int]) -> None:
        length = self.cached_prefix(root, path)
        fresh = self.add(root, path, 0)
        inserted = self.tree.insert(root, key_of(path), fresh, hashes_of(root, path))
        assert inserted.added == fresh[length:]
        assert len(inserted.end.pages) == len(path)

    @rule(target=locks, root=st.sampled_from(ROOTS), path=PATHS)
    def lock(self, root: bytes, path: list[int]) -> tuple[Node, bytes, list[int], int]:
        length = self.cached_prefix(root, path)
        node = self.tree.lock(self.tree.match_prefix(root, key_of(path)))
        for index in range(length + 1):
            prefix = (root, tuple(path[:index]))
            self.locked[prefix] = self.locked.get(prefix, 0) + 1
        return node, root, path[:length], self.epoch

    @rule(lock=consumes(locks))
    def unlock(self, lock: tuple[Node, bytes, list[int], int]) -> None:
        node, root, path, epoch = lock
        removed = self.tree.unlock(node)
        if epoch != self.epoch:
            for page in removed.pages:
                assert self.kept.pop(page) == epoch
            return
        assert removed.pages == []
        for index in range(len(path) + 1):
            self.locked[root, tuple(path[:index])] -= 1

    @rule(target=locks, lock=consumes(locks), more=PATHS)
    def grow(self, lock: tuple[Node, bytes, list[int], int], more: list[int]) -> tuple[Node, bytes, list[int], int]:
        """A running sequence publishes pages behind its lock and moves the lock to their end."""
        node, root, path, epoch = lock
        assert self.tree.is_current(node) == (epoch == self.epoch)
        if epoch != self.epoch:
            return lock
        whole = path + more
        length = self.cached_prefix(root, whole)
        fresh = self.add(root, whole, len(path))
        inserted = self.tree.insert(root, key_of(more), fresh, hashes_of(root, whole)[len(path) :], node)
        assert inserted.added == fresh[length - len(path) :]
        end = self.tree.lock(inserted.end)
        assert self.tree.unlock(node).pages == []
        for index in range(len(path) + 1, len(whole) + 1):
            prefix = (root, tuple(whole[:index]))
            self.locked[prefix] = self.locked.get(prefix, 0) + 1
        return end, root, whole, epoch

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        evictable = self.evictable()
        removed = self.tree.evict(num_pages)
        assert len(removed.pages) == min(num_pages, len(evictable))
        by_page = {page: prefix for prefix, page in self.pages.items()}
        for page, hashed in zip(removed.pages, removed.hashes, strict=True):
            root, path = prefix = by_page[page]
            assert prefix in evictable
            assert hashed == hashes_of(root, list(path))[-1]
            assert not any(other[0] == root and other[1][:-1] == path for other in self.pages), "children go first"
            del self.pages[prefix]

    @rule()
    def clear(self) -> None:
        evictable = self.evictable()
        removed = self.tree.clear()
        assert set(removed.pages) == {self.pages[prefix] for prefix in evictable}
        assert len(removed.pages) == len(removed.hashes) == len(evictable)
        for prefix, page in self.pages.items():
            if prefix not in evictable:
                self.kept[page] = self.epoch
        self.pages.clear()
        self.locked.clear()
        self.epoch += 1

    def evictable(self) -> set[tuple[bytes, tuple[int, ...]]]:
        return {prefix for prefix in self.pages if not self.locked.get(prefix)}

    @invariant()
    def counts_agree(self) -> None:
        assert self.tree.num_pages == len(self.pages)
        assert self.tree.num_evictable == len(self.evictable())

    @invariant()
    def runs_are_the_model(self) -> None:
        seen: dict[bytes, int] = {}
        num_nodes = 0
        for node, parent_hash in self.tree.runs():
            num_nodes += 1
            assert parent_hash in seen or parent_hash in ROOTS, "parents come before children"
            assert len(node.pages) == len(node.hashes) == len(node.key) // STRIDE > 0
            for index, hashed in enumerate(node.hashes):
                key = node.key[index * STRIDE : (index + 1) * STRIDE]
                assert hashed == page_hash(parent_hash, key)
                parent_hash = hashed
                seen[hashed] = node.pages[index]
        assert num_nodes == self.tree.num_nodes
        assert seen == {hashes_of(root, list(path))[-1]: page for (root, path), page in self.pages.items()}

    def teardown(self) -> None:
        assert all(count >= 0 for count in self.locked.values())


class FrequentMachine(TreeMachine):
    policy = LeastFrequentlyUsed()


class FirstInMachine(TreeMachine):
    policy = FirstInFirstOut()


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = SETTINGS
TestFrequentMachine = FrequentMachine.TestCase
TestFrequentMachine.settings = settings(SETTINGS, max_examples=15)
TestFirstInMachine = FirstInMachine.TestCase
TestFirstInMachine.settings = settings(SETTINGS, max_examples=15)


def grown(policy: EvictionPolicy | None = None) -> RadixTree:
    """Three one-page prefixes, inserted in order 0, 1, 2 as pages 10, 11, 12."""
    tree = RadixTree(PAGE_SIZE, policy)
    for path in range(3):
        tree.insert(ROOTS[0], key_of([path]), [10 + path], hashes_of(ROOTS[0], [path]))
    return tree


def use(tree: RadixTree, path: int) -> None:
    tree.unlock(tree.lock(tree.match_prefix(ROOTS[0], key_of([path]))))


def order(tree: RadixTree) -> list[int]:
    return tree.evict(10).pages


def test_least_recently_used_goes_first() -> None:
    tree = grown()
    use(tree, 0)
    assert order(tree) == [11, 12, 10]
    tree = grown(LeastRecentlyUsed())
    use(tree, 1)
    use(tree, 0)
    assert order(tree) == [12, 11, 10]


def test_least_frequently_used_goes_first() -> None:
    tree = grown(LeastFrequentlyUsed())
    for path in (0, 0, 1, 1, 2):
        use(tree, path)
    assert order(tree) == [12, 10, 11]


def test_first_in_goes_first_out() -> None:
    tree = grown(FirstInFirstOut())
    use(tree, 0)
    assert order(tree) == [10, 11, 12]


def test_a_match_alone_changes_nothing() -> None:
    tree = RadixTree(PAGE_SIZE)
    tree.insert(ROOTS[0], key_of([0, 1, 2]), [1, 2, 3], hashes_of(ROOTS[0], [0, 1, 2]))
    match = tree.match_prefix(ROOTS[0], key_of([0, 1, 0]))
    assert (match.pages, match.num_partial, tree.num_nodes) == ([1, 2], 2, 1)
    node = tree.lock(match)
    assert (tree.num_nodes, tree.num_evictable) == (2, 1)
    assert tree.evict(9).pages == [3]
    tree.unlock(node)
    assert tree.evict(9).pages == [2, 1]
    assert tree.num_nodes == 0


def test_a_running_sequence_stays_one_edge() -> None:
    tree = RadixTree(PAGE_SIZE)
    node = tree.lock(tree.match_prefix(ROOTS[0], b""))
    path: list[int] = []
    for index in range(50):
        path.append(index)
        inserted = tree.insert(ROOTS[0], key_of([index]), [index + 1], hashes_of(ROOTS[0], path)[-1:], node)
        end = tree.lock(inserted.end)
        tree.unlock(node)
        node = end
    assert (tree.num_nodes, tree.num_pages, tree.num_evictable) == (1, 50, 0)
    tree.unlock(node)
    assert tree.num_evictable == 50


def test_the_heap_of_candidates_stays_small() -> None:
    tree = grown()
    for _ in range(1000):
        use(tree, 1)
    # By a private name: what else shows it is memory.
    assert len(tree._heap) <= 64 + 4 * tree.num_nodes
    assert sorted(order(tree)) == [10, 11, 12]


@given(st.integers(1, 400))
def test_long_prompts_are_compared_at_once(num_pages: int) -> None:
    tree = RadixTree(PAGE_SIZE)
    path = list(range(400))
    tree.insert(ROOTS[0], key_of(path), path, hashes_of(ROOTS[0], path))
    asked = [*path[:num_pages], 9999]
    assert len(tree.match_prefix(ROOTS[0], key_of(asked)).pages) == num_pages
