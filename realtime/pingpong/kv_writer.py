"""What prefill does to the KV: reserves pages, loads prefixes, writes rows.

Rows are collected, of as many slots as the model takes at once, and written by `flush`.

Pages are reserved before they are written: those of a prefix, and those of a closed segment with
all its frames, at once, so that whoever has begun also comes to an end. Text that still grows takes
what is free. Who finds the pool empty waits its turn, and may take the pages of slots that say
nothing at the moment. Those make their KV again when they need it, from the inputs that the cache
remembers; they reserve for that and for their next segment at once, so that slots cannot take each
other's pages in turn for ever.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from model.errors import ConfigError
from model.kv_cache import KVCache
from model.pages import PageAllocator
from model.speech_model import SpeechModel
from realtime.pingpong.device import Event
from realtime.pingpong.memory import Memory
from realtime.pingpong.prefill_rows import Piece, PrefillRunner
from realtime.pingpong.prefix_cache import PrefixCache, prefix_key
from realtime.pingpong.tenants import AUDIO_WAITS, CONTEXT_WAITS, Prefix, Tenant

# Rows of a call. Who commits a text while a call runs waits for its end, so only texts that are
# waited for make a call as big as the model takes.
_CHUNK_POSITIONS = 64  # of models that take one slot at a time
_ROWS_IN_NO_HURRY = 128


class KvWriter:
    """One thread, the prefill thread, uses it (and start-up)."""

    def __init__(
        self,
        model: SpeechModel,
        cache: KVCache,
        tenants: dict[int, Tenant],
        chunk_positions: int | None,
    ) -> None:
        """`tenants` is the caller's, served longest ago first."""
        self._device = model.device
        self._cache = cache
        self._tenants = tenants
        self.runner = PrefillRunner(model.dual_ar, cache)
        most = self.runner.max_rows if self.runner.takes_many else _CHUNK_POSITIONS
        self._max_rows = min(chunk_positions or most, self.runner.max_rows)
        self._limit = self._max_rows  # of rows in the call that is being collected
        self._pieces: list[Piece] = []
        self._num_rows = 0
        self._members: dict[int, int] = {}  # slots that take part in it, with their urgency
        self._written: set[int] = set()  # slots that it writes to: those keep their pages
        self._keys_to_add: set[bytes] = set()  # of prefixes that it completes
        self._after: list[Callable[[Event], None]] = []
        self._launched = Event(self._device)  # the call before
        self._stuck: set[int] = set()  # slots that can do nothing until something happens
        self.allocator = PageAllocator(cache.num_pages)
        self.prefixes = PrefixCache(cache, self.allocator)
        self.memory = Memory(
            cache, self.allocator, self.prefixes, self._reclaim, on_change=self.try_again
        )
        self.num_positions = 0  # written so far, for metrics
        self.num_stripped = 0  # times that a slot lost its pages
        self.stripped: list[Tenant] = []  # since whoever asks looked last

    def is_able(self, tenant: Tenant) -> bool:
        """Whether it is worth trying to go on with it."""
        idx = tenant.slot.idx
        return idx not in self._stuck and not self.memory.is_behind(idx)

    def is_stuck(self, tenant: Tenant) -> bool:
        return tenant.slot.idx in self._stuck

    def is_in_call(self, tenant: Tenant) -> bool:
        """The call that is being collected writes to its slot."""
        return tenant.slot.idx in self._written

    def try_again(self) -> None:
        """Something has happened: pages or a prefix may have come, or the line has moved."""
        self._stuck.clear()

    # ------------------------------------------------------------------ writing

    def admit(self, tenant: Tenant) -> bool:
        """Let a tenant take part in the next call, the most urgent first. False: it is full. Who is
        less urgent than somebody who waits for audio must not make the call bigger, but may have
        rows that would be padding."""
        if self._members and not self.runner.takes_many:
            return False
        urgency = tenant.urgency()
        if urgency > AUDIO_WAITS:
            is_hurried = self._num_rows > 0 and AUDIO_WAITS in self._members.values()
            most = self.runner.size_for(self._num_rows) if is_hurried else _ROWS_IN_NO_HURRY
            self._limit = min(self._limit, most)
        if self._members and self._num_rows >= self._limit:
            return False
        self._members[tenant.slot.idx] = urgency
        return True

    def wait_for_call(self) -> None:
        """Until the device has done the last call. Who commits a text meanwhile is in the next one:
        calls cost by the row and by the call."""
        if not self._launched.is_over():
            self._launched.wait_on_host()

    def flush(self) -> None:
        """Launch the call; then do what had to wait for it (`after`)."""
        pieces, after = self._pieces, self._after
        self._pieces, self._after, self._members, self._written = [], [], {}, set()
        self._num_rows, self._limit, self._keys_to_add = 0, self._max_rows, set()
        if pieces or after:
            written = Event(self._device)
        if pieces:
            self.runner.write(pieces)
            self.try_again()  # who was written to may give up pages from now on
        if pieces or after:
            written.record()
            self._launched = written
            for call in after:
                call(written)

    def after(self, call: Callable[[Event], None]) -> None:
        """Do it once the rows collected so far are on their way; the event marks their end."""
        self._after.append(call)

    def next_stop(self, start: int, stop: int) -> int:
        """How far rows from `start` on can be written in this call."""
        return min(stop, start + self._limit - self._num_rows)

    def write(self, tenant: Tenant, rows: Tensor, base: int, start: int, stop: int) -> None:
        """Write rows[:, start:stop] to the slot's positions from `base + start` on."""
        self._add(tenant, rows[:, start:stop], base + start, base + stop)

    def _add(self, tenant: Tenant, rows: Tensor | None, start: int, stop: int) -> None:
        if stop > start:
            self._pieces.append(Piece(tenant.slot.idx, start, rows, stop - start))
            self._written.add(tenant.slot.idx)
            self._num_rows += stop - start
            self.num_positions += stop - start

    def restore(self, tenant: Tenant, length: int, *, is_urgent: bool) -> bool:
        """Do the next thing to have the slot's whole context in the KV, with pages for its first
        `length` positions if it is not. True: it is."""
        assert tenant.prefix is not None, tenant
        if not self.load(tenant, tenant.prefix, length, is_urgent=is_urgent):
            return False
        start = tenant.num_in_kv
        if start == tenant.context_length:
            return True
        if not self.reserve(tenant, length, is_urgent=is_urgent):
            return False
        stop = self.next_stop(start, tenant.context_length)
        self._add(tenant, None, start, stop)
        tenant.num_in_kv, tenant.has_reserved = stop, stop < tenant.context_length
        return not tenant.has_reserved

    def shorten(self, tenant: Tenant, num_kept: int, num_lead: int) -> None:
        """See `Tenant.drop_oldest`; what is kept is made again (`restore`) where it belongs now."""
        end, idx = tenant.context_length, tenant.slot.idx
        cut = tenant.drop_oldest(num_kept, num_lead)
        self._cache.move_history(idx, cut, end, tenant.prefix_length)
        if tenant.key_in_kv is not None:
            self.memory.trim(idx, tenant.prefix_length)

    def load(self, tenant: Tenant, prefix: Prefix, length: int, *, is_urgent: bool = True) -> bool:
        """Do the next thing to make the slot's KV begin with the prefix, and to have pages for its
        first `length` positions if the prefix is not there yet. True: it is."""
        if tenant.key_in_kv == prefix.key:
            return True
        if not prefix.num_done:
            if self._take_from_cache(tenant, prefix, length, is_urgent=is_urgent):
                return True
            if self.is_stuck(tenant):
                return False
        if not self.reserve(tenant, length, is_urgent=is_urgent):
            return False
        tenant.has_reserved, prefix.was_cached = True, False
        stop = self.next_stop(prefix.num_done, prefix.length)
        self.write(tenant, prefix.rows, 0, prefix.num_done, stop)
        prefix.num_done = stop
        if stop < prefix.length:
            return False
        self.prefixes.num_misses += 1
        self._keys_to_add.add(prefix.key)
        self.after(partial(self._keep, prefix, tenant.slot.idx))
        tenant.has_reserved, prefix.num_done = False, 0
        tenant.key_in_kv, tenant.num_in_kv = prefix.key, prefix.length
        return True

    def _keep(self, prefix: Prefix, slot: int, _: Event) -> None:
        self.prefixes.add(prefix.key, self._cache.pages(slot), prefix.length)
        self.try_again()

    def _take_from_cache(
        self, tenant: Tenant, prefix: Prefix, length: int, *, is_urgent: bool
    ) -> bool:
        """The slot has no pages afterwards if there is nothing to take; stuck if there will be."""
        idx, cached = tenant.slot.idx, self.prefixes.get(prefix.key)
        tenant.forget_kv()
        if cached is not None and self.memory.start_from(idx, cached, length, is_urgent=is_urgent):
            self.prefixes.num_hits += 1
            prefix.was_cached = True
            tenant.key_in_kv, tenant.num_in_kv = prefix.key, prefix.length
            return True
        self.memory.trim(idx, 0)
        if self.prefixes.get(prefix.key) is not None or self._is_being_loaded(prefix.key):
            self._stuck.add(idx)
        return False

    def _is_being_loaded(self, key: bytes) -> bool:
        """Somebody is writing that prefix: it will be in the cache soon."""
        return key in self._keys_to_add or any(
            prefix is not None and prefix.key == key and prefix.num_done > 0
            for tenant in self._tenants.values()
            for prefix in (tenant.prefix, tenant.opening_prefix)
        )

    def warm_up(self, rows: Tensor) -> None:
        """Write a prefix and keep it for ever. Only while no slot is open.

        Raises:
            ConfigError: there are too few pages.
        """
        prefix = Prefix(rows, prefix_key(rows))
        tenant = Tenant.nobody()
        num_left = self.allocator.num_free - self._cache.num_pages_of(prefix.length)
        if num_left < self._cache.max_pages:
            raise ConfigError(
                f"{self._cache.num_pages} pages of {self._cache.page_size} positions are too few "
                f"for the default voice ({prefix.length} positions) and one context of "
                f"{self._cache.max_len}; give the KV cache more pages or lower the context"
            )
        while not self.load(tenant, prefix, prefix.length):
            self.flush()
        self.flush()
        pages = self._cache.pages(tenant.slot.idx)
        self.prefixes.add(prefix.key, pages, prefix.length, is_pinned=True)
        self.memory.trim(tenant.slot.idx, 0)
        written = Event(self._device)  # by another thread's stream than the prefill thread's
        written.record()
        written.wait_on_host()

    # ------------------------------------------------------------------ pages

    def reserve(self, tenant: Tenant, length: int, *, is_urgent: bool) -> bool:
        """Pages for the slot's first `length` positions; False: it is stuck for now."""
        had_reserved, tenant.has_reserved = tenant.has_reserved, False
        is_done = self.memory.reserve(tenant.slot.idx, length, is_urgent=is_urgent)
        if not is_done:
            if had_reserved:  # for less: it is under way no more, and others may take its pages
                self.try_again()
            self._stuck.add(tenant.slot.idx)
        return is_done

    def trim(self, tenant: Tenant) -> None:
        """Give back what lies behind the context."""
        if tenant.key_in_kv is not None:  # else the pages are no context yet
            self.memory.trim(tenant.slot.idx, tenant.context_length)

    def release(self, tenant: Tenant) -> None:
        self.memory.trim(tenant.slot.idx, 0)

    def _reclaim(self, needy: int) -> bool:
        """Take all pages of one slot: of the one that has said nothing for longest. Of one that
        waits itself, or whose text grows, only while nobody is under way whose pages come back."""
        tenants = list(self._tenants.values())
        idle = [
            tenant
            for tenant in tenants
            if tenant.slot.idx != needy
            and not tenant.is_under_way
            and tenant.slot.idx not in self._written
            and self._has_pages(tenant)
        ]
        victim = max(idle, key=Tenant.urgency, default=None)
        if victim is None or (
            victim.urgency() < CONTEXT_WAITS and any(tenant.is_under_way for tenant in tenants)
        ):
            return False
        victim.forget_kv()
        victim.start_context(victim.context_length)
        self.memory.trim(victim.slot.idx, 0)
        self.num_stripped += 1
        self.stripped.append(victim)
        return True

    def _has_pages(self, tenant: Tenant) -> bool:
        return bool(self._cache.pages(tenant.slot.idx))
