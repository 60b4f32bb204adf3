"""Which token prefixes have their KV in cached pages: a radix tree over token ids at page granularity.

An edge is a run of whole pages; a node's children are told apart by the tokens of their first page, so two edges never
share a page. Trees are kept apart by root (`hashing.root_hash`: the extra key). Keys are packed token ids
(`hashing.pack_tokens`), so a run is compared by one memcmp.

Locks: a lock on a node holds every page from the root to it; `lock_count` of a node counts the locks on it and below.
A page is evictable exactly if its node has no lock; an unlocked node has no locked descendants. Splitting keeps the
lower half's identity, so locks stay where they were.

    match_prefix   reads only
    lock           splits an edge where the match ends inside one, then locks
    insert         adds what is missing; pages whose tokens the tree already has stay with their holder
    evict          takes unlocked pages from the ends of edges, in the policy's order
    clear          forgets everything; locked pages are returned when their last lock is released

All operations are linear in the pages they visit; none recurses. Pure; owned by `prefix_cache`.
The idea is from SGLang's RadixCache.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from kvstore.hashing import TOKEN_BYTES


class Node:
    """One edge and its lower end. A root has no pages and no parent."""

    __slots__ = (
        "children",
        "created",
        "hashes",
        "key",
        "last_used",
        "lock_count",
        "num_uses",
        "pages",
        "parent",
        "root",
        "ticket",
    )

    def __init__(self, root: bytes, parent: "Node | None", key: bytes, pages: list[int], hashes: list[bytes]) -> None:
        self.root = root
        self.parent = parent
        self.key = key
        self.pages = pages
        self.hashes = hashes
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.created = 0
        self.last_used = 0
        self.num_uses = 0
        # Number of the node's one valid entry in the eviction heap; 0 if it has none.
        self.ticket = 0


class TreeMatch(NamedTuple):
    """What a walk found: `pages` from the root on; the last `num_partial` of them lie inside the edge of `partial`."""

    root: bytes
    pages: list[int]
    node: Node | None
    partial: Node | None
    num_partial: int

    @property
    def last_hash(self) -> bytes:
        """The last page's, which is the next page's parent."""
        if self.partial is not None:
            return self.partial.hashes[self.num_partial - 1]
        return self.node.hashes[-1] if self.node is not None and self.node.hashes else self.root


class Inserted(NamedTuple):
    """`added` pages belong to the tree now; it had the tokens of those before them already. `end` is the end of all."""

    end: TreeMatch
    added: list[int]


class Removed(NamedTuple):
    """Pages that left the tree, in columns: a tuple for each would cost as much as all else that evicting it does."""

    pages: list[int]
    hashes: list[bytes]

    def add_end(self, node: Node, num_pages: int) -> None:
        """The last pages of an edge, the last one first."""
        self.pages.extend(node.pages[: -num_pages - 1 : -1])
        self.hashes.extend(node.hashes[: -num_pages - 1 : -1])


class RadixTree:
    """All cached prefixes of one pool: `num_pages` on `num_nodes` edges; `evict` could take `num_evictable` of them.

    Pages that only a lock keeps after `clear` are not counted.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy | None = None) -> None:
        self.page_size = page_size
        self._stride = page_size * TOKEN_BYTES
        self._policy = policy or LeastRecentlyUsed()
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._tick = 0
        self._tickets = 0
        self.num_nodes = 0
        self.num_pages = 0
        self.num_evictable = 0

    def match_prefix(self, root: bytes, key: bytes) -> TreeMatch:
        start = self._roots.get(root)
        if start is None:
            return TreeMatch(root, [], None, None, 0)
        return self._walk(start, key)

    def lock(self, match: TreeMatch) -> Node:
        """Hold the matched pages until `unlock` of the returned node. The tree must not have changed since matching."""
        node = match.node or self._open_root(match.root)
        if match.partial is not None:
            node = self._split(match.partial, match.num_partial)
        self._tick += 1
        step: Node | None = node
        while step is not None:
            if step.lock_count == 0:
                self.num_evictable -= len(step.pages)
            step.lock_count += 1
            step.last_used = self._tick
            step.num_uses += 1
            step = step.parent
        return node

    def unlock(self, node: Node) -> Removed:
        """Release one lock. Returns pages that, after `clear`, only this lock kept; otherwise none."""
        # Checked before the walk, which takes pages out of nodes.
        cleared = not self.is_current(node)
        removed = Removed([], [])
        step: Node | None = node
        while step is not None:
            step.lock_count -= 1
            parent = step.parent
            if step.lock_count == 0:
                if cleared:
                    removed.add_end(step, len(step.pages))
                    step.pages = []
                else:
                    self.num_evictable += len(step.pages)
                    self._offer(step)
            step = parent
        return removed

    def is_current(self, node: Node) -> bool:
        """False if `clear` ran since `node` was made: nothing may be inserted below it."""
        return self._top(node) is self._roots.get(node.root)

    def insert(
        self, root: bytes, key: bytes, pages: Sequence[int], hashes: Sequence[bytes], held: Node | None = None
    ) -> Inserted:
        """Add pages for the tokens of `key`, which has exactly `len(pages)` pages.

        `held` is a current node that the caller has locked: the key then continues from it. It may grow in place if
        nobody else holds it, which keeps a running sequence one edge long.
        """
        match = self._walk(held or self._open_root(root), key)
        num_present = len(match.pages)
        # The tree keeps its pages rather than new ones with the same tokens: others may hold them already.
        added = list(pages[num_present:])
        if not added:
            return Inserted(match, [])
        node = match.node if match.partial is None else self._split(match.partial, match.num_partial)
        assert node is not None, "a walk from a node ends at a node"
        end = self._append(node, key[num_present * self._stride :], added, list(hashes[num_present:]), held)
        return Inserted(TreeMatch(root, match.pages + added, end, None, 0), added)

    def evict(self, num_pages: int) -> Removed:
        removed = Removed([], [])
        while (wanted := num_pages - len(removed.pages)) > 0 and self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            # An outdated entry. Removing it when the node changed would mean a search through the heap at every lock.
            if ticket != node.ticket:
                continue
            node.ticket = 0
            if node.lock_count or node.children:
                continue
            # From the end of the edge, and no more than needed: the rest is still a prefix that a prompt can match.
            if wanted < len(node.pages):
                removed.add_end(node, wanted)
                self._trim(node, wanted)
            else:
                removed.add_end(node, len(node.pages))
                self._remove_leaf(node)
        return removed

    def clear(self) -> Removed:
        removed = Removed([], [])
        for node in self._nodes_children_first():
            if node.lock_count == 0:
                removed.add_end(node, len(node.pages))
                if node.parent is not None:
                    del node.parent.children[node.key[: self._stride]]
        # Nodes outlive the tree in handles; their tickets must not equal a number given out later.
        for _, _, node in self._heap:
            node.ticket = 0
        self._roots.clear()
        self._heap.clear()
        self.num_nodes = self.num_pages = self.num_evictable = 0
        return removed

    def runs(self) -> Iterator[tuple[Node, bytes]]:
        """Every edge with the hash before its first page, parents before children."""
        for root in self._roots.values():
            # Iterators, not lists of children: a root may have as many as the pool has pages.
            stack = [(iter(root.children.values()), root.root)]
            while stack:
                children, parent_hash = stack[-1]
                if (node := next(children, None)) is None:
                    stack.pop()
                else:
                    yield node, parent_hash
                    stack.append((iter(node.children.values()), node.hashes[-1]))

    # inside

    def _walk(self, node: Node, key: bytes) -> TreeMatch:
        stride = self._stride
        offset, end = 0, len(key) // stride * stride
        pages: list[int] = []
        while offset < end:
            child = node.children.get(key[offset : offset + stride])
            if child is None:
                break
            # Usually one memcmp of the whole edge is enough; page by page only if the match ends inside the edge.
            if not (key.startswith(child.key, offset) and offset + len(child.key) <= end):
                num_common = _num_common_pages(child.key, key[offset:end], stride)
                return TreeMatch(node.root, pages + child.pages[:num_common], node, child, num_common)
            pages.extend(child.pages)
            offset += len(child.key)
            node = child
        return TreeMatch(node.root, pages, node, None, 0)

    def _open_root(self, root: bytes) -> Node:
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = Node(root, None, b"", [], [])
        return node

    @staticmethod
    def _top(node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    def _split(self, lower: Node, num_pages: int) -> Node:
        """Cut an edge after `num_pages` pages; `lower` keeps its identity, the new node above it is returned."""
        stride, cut = self._stride, num_pages * self._stride
        parent = lower.parent
        assert parent is not None, "a root has no edge to split"
        upper = Node(lower.root, parent, lower.key[:cut], lower.pages[:num_pages], lower.hashes[:num_pages])
        # All locks on `lower` also hold what is above it, and nobody has locked the new node itself.
        upper.lock_count, upper.num_uses = lower.lock_count, lower.num_uses
        upper.created, upper.last_used = lower.created, lower.last_used
        parent.children[upper.key[:stride]] = upper
        lower.key, lower.pages, lower.hashes = lower.key[cut:], lower.pages[num_pages:], lower.hashes[num_pages:]
        lower.parent = upper
        upper.children[lower.key[:stride]] = lower
        self.num_nodes += 1
        return upper

    def _append(self, node: Node, key: bytes, pages: list[int], hashes: list[bytes], held: Node | None) -> Node:
        """Put new pages below `node`: into it if it is a leaf that nobody but the caller holds, else in a child."""
        self._tick += 1
        self.num_pages += len(pages)
        # Grown in place, a long prompt is one node, not one for each chunk: matching it stays one comparison.
        if node.parent is not None and not node.children and node.lock_count == (node is held):
            node.key += key
            node.pages.extend(pages)
            node.hashes.extend(hashes)
            end = node
        else:
            end = Node(node.root, node, key, pages, hashes)
            end.created = self._tick
            node.children[key[: self._stride]] = end
            self.num_nodes += 1
        end.last_used = self._tick
        if end.lock_count == 0:
            self.num_evictable += len(pages)
            self._offer(end)
        return end

    def _offer(self, node: Node) -> None:
        """Enter `node` for eviction if it can be evicted now; its older entry no longer counts."""
        if node.lock_count or node.children:
            return
        if node.parent is None:
            self._roots.pop(node.root, None)
            return
        self._tickets += 1
        node.ticket = self._tickets
        heapq.heappush(self._heap, (self._policy.priority(node), self._tickets, node))
        # Outdated entries are dropped when they are three quarters of the heap: amortised constant cost per use.
        if len(self._heap) > 64 + 4 * self.num_nodes:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def _trim(self, node: Node, num_pages: int) -> None:
        del node.pages[-num_pages:], node.hashes[-num_pages:]
        node.key = node.key[: len(node.pages) * self._stride]
        self.num_pages -= num_pages
        self.num_evictable -= num_pages
        self._offer(node)

    def _remove_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are never offered for eviction"
        del parent.children[node.key[: self._stride]]
        self.num_nodes -= 1
        self.num_pages -= len(node.pages)
        self.num_evictable -= len(node.pages)
        # Its last child is gone, so it may be a leaf now.
        self._offer(parent)

    def _nodes_children_first(self) -> list[Node]:
        nodes: list[Node] = list(self._roots.values())
        for node in nodes:  # grows while it is walked: breadth first
            nodes.extend(node.children.values())
        nodes.reverse()
        return nodes


def _num_common_pages(left: bytes, right: bytes, stride: int) -> int:
    # The first page is equal: children are found by it.
    num_pages, limit = 1, min(len(left), len(right)) // stride
    while num_pages < limit:
        start = num_pages * stride
        if left[start : start + stride] != right[start : start + stride]:
            break
        num_pages += 1
    return num_pages
