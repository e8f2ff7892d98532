"""Which slot has how many pages of KV, and who waits for some."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from model.dual_ar import DualAR
from model.errors import ConfigError
from model.kv_cache import KVCache, KvFormat, position_bytes
from model.pages import PageAllocator
from realtime.pingpong.prefix_cache import CachedPrefix, PrefixCache

# What torch says on a CPU, on CUDA, and of sizes that no integer holds.
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "overflowed")


class Memory:
    """The pages of the slots. One thread, the prefill thread, uses it (and start-up).

    Whoever cannot have its pages waits its turn: nobody who came later is served before. Unused
    prefixes make room first; then `reclaim`, which is told who needs room and takes the pages of
    one slot that can do without (False: there is none).
    """

    def __init__(
        self,
        cache: KVCache,
        allocator: PageAllocator,
        prefixes: PrefixCache,
        reclaim: Callable[[int], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is told when pages have come back or the line has moved."""
        self._cache = cache
        self._allocator = allocator
        self._prefixes = prefixes
        self._reclaim = reclaim
        self._on_change = on_change
        self._waiting: dict[int, None] = {}  # slots, oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_behind(self, slot: int) -> bool:
        """The slot waits, and not at the head of the line."""
        return slot in self._waiting and self._is_others_turn(slot)

    def leave(self, slot: int) -> None:
        """The slot wants nothing any more."""
        if slot in self._waiting:
            del self._waiting[slot]
            self._on_change()

    def reserve(self, slot: int, num_positions: int, *, is_urgent: bool) -> bool:
        """Pages for the slot's first `num_positions`. False: not now; if urgent it waits in line."""
        pages = self._cache.pages(slot)
        num_more = self._cache.num_pages_of(num_positions) - len(pages)
        if num_more <= 0:
            self.leave(slot)
            return True
        if self._is_others_turn(slot) or not self._make_room(slot, num_more, may_reclaim=is_urgent):
            if is_urgent:
                self._waiting.setdefault(slot)
            return False
        self.leave(slot)
        self._cache.assign(slot, [*pages, *self._allocator.take(num_more)])
        return True

    def trim(self, slot: int, num_positions: int) -> None:
        """Give back the pages behind the first `num_positions`."""
        if self._cut(slot, self._cache.num_pages_of(num_positions)):
            self._on_change()

    def start_from(
        self, slot: int, prefix: CachedPrefix, num_positions: int, *, is_urgent: bool
    ) -> bool:
        """Let the slot begin with the prefix, and have pages for `num_positions` in all. False: not
        now, as for `reserve`, and it has no pages at all; nor may there be the prefix any more."""
        num_full, num_rest = divmod(prefix.length, self._cache.page_size)
        self.trim(slot, 0)
        self._allocator.share(prefix.pages)  # also its last page, while room is looked for
        self._cache.assign(slot, prefix.pages[:num_full])
        is_done = self.reserve(slot, num_positions, is_urgent=is_urgent)
        if is_done and num_rest:
            self._cache.copy_page(prefix.pages[-1], self._cache.pages(slot)[num_full], num_rest)
        self._allocator.release(prefix.pages[num_full:])
        if not is_done:
            self._cut(slot, 0)
        if not is_done and self._allocator.num_used == len(self._prefixes.pages):
            # No slot has pages that could come back: there is room without the prefix alone.
            self._make_room(slot, self._cache.num_pages_of(num_positions), may_reclaim=False)
        return is_done

    def _cut(self, slot: int, num_kept: int) -> bool:
        pages = self._cache.pages(slot)
        self._cache.assign(slot, pages[:num_kept])
        self._allocator.release(pages[num_kept:])
        return num_kept < len(pages)

    def _is_others_turn(self, slot: int) -> bool:
        return bool(self._waiting) and next(iter(self._waiting)) != slot

    def _make_room(self, slot: int, num_pages: int, *, may_reclaim: bool) -> bool:
        while self._allocator.num_free < num_pages:
            has_more = self._prefixes.evict_one() or (may_reclaim and self._reclaim(slot))
            if not has_more:
                return False
        return True


def pool_pages(
    model: DualAR,
    num_slots: int,
    max_positions: int,
    max_prefix_positions: int,
    page_size: int,
    memory_fraction: float,
    kv_format: KvFormat,
) -> int:
    """Pages (with page 0) for the whole context of every slot and for cached prefixes; on CUDA no
    more than fit into a fraction of the memory that is free now."""
    num_pages = 1 + num_slots * -(-max_positions // page_size)
    num_pages += max(1, max_prefix_positions // page_size)
    if model.device.type != "cuda":
        return num_pages
    num_free_bytes, _ = torch.cuda.mem_get_info(model.device)
    position = position_bytes(model.config, model.dtype, kv_format)
    return min(num_pages, int(num_free_bytes * memory_fraction) // (position * page_size))


@contextmanager
def memory_of(
    model: DualAR, num_slots: int, max_positions: int, kv_format: KvFormat
) -> Iterator[None]:
    """Around all that is taken for the slots: says in words when there is no room for it.

    Raises:
        ConfigError: naming slots, context and what their keys and values take.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not any(sign in text for sign in _NO_MEMORY):
            raise
        position = position_bytes(model.config, model.dtype, kv_format)
        gigabytes = num_slots * max_positions * position / 1e9
        raise ConfigError(
            f"{num_slots} slots with a context of {max_positions} positions each do not fit into "
            f"the memory of {model.device}: their keys and values alone are {gigabytes:,.1f} GB; "
            "lower --max-slots or --max-context"
        ) from error
