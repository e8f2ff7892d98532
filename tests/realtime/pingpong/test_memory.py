"""Who has which pages: prefixes that are shared, slots that wait, pages that come back."""

from types import SimpleNamespace

import pytest
import torch

from model.config import DualARConfig, StackConfig
from model.kv_cache import KVCache
from model.pages import PageAllocator
from realtime.pingpong.memory import Memory, pool_pages
from realtime.pingpong.prefix_cache import PrefixCache

PAGE = 4


class Pool:
    """Eight pages of four positions, four slots, and nobody who gives up pages unless told."""

    def __init__(self, num_pages: int = 8) -> None:
        stack = StackConfig(1, 8, 1, 1, 8, 8, 1e4, 1e-6, 64, False, False, False)
        config = DualARConfig(stack, stack, 16, 2, 8, True, 0, 7, 8)
        self.cache = KVCache(
            config, 4, 32, "cpu", torch.float32, page_size=PAGE, num_pages=1 + num_pages
        )
        self.allocator = PageAllocator(1 + num_pages)
        self.prefixes = PrefixCache(self.cache, self.allocator)
        self.victims: list[int] = []
        self.num_changes = 0
        self.memory = Memory(
            self.cache, self.allocator, self.prefixes, self._reclaim, self._on_change
        )

    def _reclaim(self, needy: int) -> bool:
        if not self.victims:
            return False
        self.memory.trim(self.victims.pop(0), 0)
        return True

    def _on_change(self) -> None:
        self.num_changes += 1

    def reserve(self, slot: int, num_pages: int) -> bool:
        return self.memory.reserve(slot, num_pages * PAGE, is_urgent=True)

    def add_prefix(self, key: bytes, length: int, *, is_pinned: bool = False) -> None:
        assert self.memory.reserve(3, length, is_urgent=True)
        self.prefixes.add(key, self.cache.pages(3), length, is_pinned=is_pinned)
        self.memory.trim(3, 0)


def test_slots_share_the_full_pages_of_a_prefix_and_copy_its_last() -> None:
    pool = Pool()
    pool.memory.reserve(3, 10, is_urgent=True)
    pool.cache.kv[:, pool.cache.pages(3)[2]] = 5.0
    pool.prefixes.add(b"a", pool.cache.pages(3), 10)
    pool.memory.trim(3, 0)
    prefix = pool.prefixes.get(b"a")
    assert prefix is not None and len(prefix.pages) == 3
    for slot in (0, 1):
        assert pool.memory.start_from(slot, prefix, 10, is_urgent=True)
        assert pool.cache.pages(slot)[:2] == prefix.pages[:2]
        assert torch.all(pool.cache.read(slot, 10)[:, :, :, 8:] == 5.0)
    assert len({pool.cache.pages(slot)[2] for slot in (0, 1)} | {prefix.pages[2]}) == 3
    assert pool.allocator.num_used == 5
    for slot in (0, 1):
        pool.memory.trim(slot, 0)
    assert pool.allocator.num_used == 3


def test_a_prefix_that_two_sessions_prefilled_at_once_is_kept_once() -> None:
    pool = Pool()
    for _ in range(3):
        pool.add_prefix(b"a", 7)
    assert len(pool.prefixes) == 1 and pool.allocator.num_used == 2


def test_unused_prefixes_make_room_least_recently_used_first_and_pinned_ones_never() -> None:
    pool = Pool()
    pool.add_prefix(b"pinned", 8, is_pinned=True)
    for key in (b"old", b"new"):
        pool.add_prefix(key, 8)
    used = pool.prefixes.get(b"old")  # the least recently used is `new` now
    assert used is not None and pool.memory.start_from(0, used, 8, is_urgent=True)
    assert pool.reserve(1, 3)
    assert pool.prefixes.get(b"new") is None
    assert not pool.reserve(2, 2), "what is left is pinned or shared"
    pool.memory.trim(0, 0)
    assert pool.reserve(2, 2)
    assert pool.prefixes.get(b"old") is None and pool.prefixes.get(b"pinned") is not None


def test_the_prefix_that_a_slot_begins_with_is_not_evicted_to_make_room_for_it() -> None:
    pool = Pool(num_pages=2)
    pool.add_prefix(b"a", 3)
    assert pool.reserve(0, 1)
    prefix = pool.prefixes.get(b"a")
    assert prefix is not None and not pool.memory.start_from(1, prefix, 3, is_urgent=True)
    assert not pool.cache.pages(1) and pool.prefixes.get(b"a") is not None
    pool.memory.trim(0, 0)
    assert pool.memory.start_from(1, prefix, 3, is_urgent=True)


def test_a_pool_without_room_for_prefix_and_context_gives_up_the_prefix() -> None:
    """The copy of the prefix's last page would be one page too many for ever."""
    pool = Pool(num_pages=8)
    pool.add_prefix(b"a", 6)
    prefix = pool.prefixes.get(b"a")
    assert prefix is not None
    assert not pool.memory.start_from(0, prefix, 8 * PAGE, is_urgent=True)
    assert pool.prefixes.get(b"a") is None and pool.allocator.num_free == 8
    assert pool.reserve(0, 8)


def test_who_came_first_is_served_first_even_if_less_would_do_for_the_next() -> None:
    pool = Pool()
    assert pool.reserve(0, 6)
    assert not pool.reserve(1, 4) and not pool.reserve(2, 1)
    assert not pool.memory.is_behind(1) and pool.memory.is_behind(2)
    assert not pool.memory.reserve(3, PAGE, is_urgent=False) and not pool.memory.is_behind(3)
    pool.memory.trim(0, 3 * PAGE)
    assert not pool.reserve(2, 1)
    assert pool.reserve(1, 4)
    assert pool.reserve(2, 1) and pool.memory.num_waiting == 0


def test_who_leaves_the_line_holds_up_nobody() -> None:
    pool = Pool()
    assert pool.reserve(0, 6)
    assert not pool.reserve(1, 4) and not pool.reserve(2, 1)
    num_changes = pool.num_changes
    pool.memory.leave(1)
    assert pool.num_changes > num_changes, "who was behind may try again"
    assert pool.reserve(2, 1)


def test_pages_are_taken_from_who_can_do_without_them_only_for_who_is_in_a_hurry() -> None:
    pool = Pool()
    assert pool.reserve(0, 5) and pool.reserve(1, 3)
    pool.victims = [0, 1]
    assert not pool.memory.reserve(2, 6 * PAGE, is_urgent=False)
    assert pool.cache.pages(0)
    assert pool.reserve(2, 5)
    assert not pool.cache.pages(0) and pool.cache.pages(1), "no more than is needed"


def test_the_pool_has_room_for_all_contexts_or_what_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = StackConfig(2, 8, 1, 1, 8, 8, 1e4, 1e-6, 64, False, False, False)
    config = DualARConfig(slow, slow, 16, 2, 8, True, 0, 7, 8)
    sizes = (10, 100, 500, 32, 0.5)  # slots, positions of one, of prefixes, of a page, fraction
    wanted = 1 + 10 * 4 + 500 // 32
    for device, num_free_bytes, kv_format, expected in (
        ("cpu", 0, "bf16", wanted),
        ("cuda", 1 << 30, "bf16", wanted),
        ("cuda", 40 * 32 * 2 * 2 * 8 * 4, "bf16", 20),
        ("cuda", 20 * 32 * 2 * 2 * 8 * 4, "fp8", 10 * 8 * 4 // (8 + 2)),
    ):
        model = SimpleNamespace(config=config, device=torch.device(device), dtype=torch.float32)
        free = (num_free_bytes, 1 << 30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: free)
        assert pool_pages(model, *sizes, kv_format) == expected  # type: ignore[arg-type]


def test_a_page_is_freed_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 3
    with pytest.raises(AssertionError):
        allocator.release(pages)
    with pytest.raises(AssertionError):
        allocator.share(pages)
    with pytest.raises(AssertionError):
        allocator.take(4)
    assert 0 not in allocator.take(3)
