"""Prefixes (speaker reference + prompt) that have been prefilled, shared by all sessions."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model.kv_cache import KVCache
from model.pages import PageAllocator


def prefix_key(rows: Tensor) -> bytes:
    """Key over ALL rows i32 [1+K, T] (host): two references may agree in codebook 0 alone."""
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).digest()


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Slots share its full pages and copy the last one if that is not full: they write there."""

    pages: tuple[int, ...]
    length: int  # positions


class PrefixCache:
    """Prefixes stay while there is room: `evict_one` makes some, least recently used first.
    One thread, the prefill thread, uses it (and start-up)."""

    def __init__(self, cache: KVCache, allocator: PageAllocator) -> None:
        self._cache = cache
        self._allocator = allocator
        self._prefixes: OrderedDict[bytes, CachedPrefix] = OrderedDict()
        self._pinned: set[bytes] = set()
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def pages(self) -> list[int]:
        """The pages it holds."""
        return [page for prefix in self._prefixes.values() for page in prefix.pages]

    @property
    def num_pinned_pages(self) -> int:
        return sum(len(self._prefixes[key].pages) for key in self._pinned)

    def get(self, key: bytes) -> CachedPrefix | None:
        prefix = self._prefixes.get(key)
        if prefix is not None:
            self._prefixes.move_to_end(key)
        return prefix

    def add(
        self, key: bytes, pages: Sequence[int], length: int, *, is_pinned: bool = False
    ) -> None:
        """Keep the prefix with which the pages of a slot begin. Dropped when there is no page for
        the copy of its last one."""
        num_full, num_rest = divmod(length, self._cache.page_size)
        if key not in self._prefixes:
            kept = list(pages[:num_full])
            if num_rest:
                while not self._allocator.num_free and self.evict_one():
                    pass
                if not self._allocator.num_free:
                    return
                kept += self._allocator.take(1)
                self._cache.copy_page(pages[num_full], kept[-1], num_rest)
            self._allocator.share(pages[:num_full])
            self._prefixes[key] = CachedPrefix(tuple(kept), length)
        if is_pinned:
            self._pinned.add(key)

    def evict_one(self) -> bool:
        """Forget the least recently used prefix that no slot shares and that is not pinned."""
        for key, prefix in self._prefixes.items():
            is_shared = any(self._allocator.num_users(page) > 1 for page in prefix.pages)
            if not is_shared and key not in self._pinned:
                del self._prefixes[key]
                self._allocator.release(prefix.pages)
                return True
        return False
