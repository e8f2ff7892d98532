"""Prefixes (speaker reference + prompt) that have been prefilled, shared by all sessions."""

import hashlib
from collections import OrderedDict

from torch import Tensor

from model.kv_cache import Prefix


def prefix_key(rows: Tensor) -> bytes:
    """Key over ALL rows i32 [1+K, T] (host): two references may agree in codebook 0 alone."""
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).digest()


class PrefixCache:
    """Least recently used first out. One thread, the prefill thread, uses it (and start-up)."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._num_positions = 0
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._pinned: set[bytes] = set()
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def get(self, key: bytes) -> Prefix | None:
        prefix = self._prefixes.get(key)
        if prefix is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._prefixes.move_to_end(key)
        return prefix

    def add(self, key: bytes, prefix: Prefix, *, is_pinned: bool = False) -> None:
        """Keep the prefix; drops the least recently used while over the limit, never the new one
        and never a pinned one."""
        if is_pinned:
            self._pinned.add(key)
        if key in self._prefixes:  # two sessions prefilled it at the same time
            return
        self._prefixes[key] = prefix
        self._num_positions += prefix.length
        for old in [old for old in self._prefixes if old not in self._pinned and old != key]:
            if self._num_positions <= self._max_positions:
                return
            self._num_positions -= self._prefixes.pop(old).length
