"""The prefill thread: owns every slot that is not decoding, and all knowledge of turns.

It takes commands from the event loop and slots that decode gives back, and turns them into KV: the
voice's prefix at connect, text while it is still being written, the assistant header once a segment
is closed. A slot whose segment is fully prefilled goes to decode as a `Join`. Work is done in
calls of limited size, most urgent first, so that nobody's first audio waits for somebody's long
reference; `KvWriter` knows how many slots fit into a call and who has to wait for pages.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from model.errors import PromptError
from model.kv_cache import KVCache
from model.speech_model import SpeechModel
from realtime.pingpong.device import PREFILL_PRIORITY, Event, stream_scope
from realtime.pingpong.hand_over import HandOver
from realtime.pingpong.handoff import Mailbox
from realtime.pingpong.kv_writer import KvWriter
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    Command,
    EndTurn,
    EngineWarning,
    OpenSlot,
    SegmentEnd,
    SetText,
    SlotClosed,
    SlotFailed,
    SlotReady,
    SlotRef,
    TurnEnd,
    VoicePrompt,
)
from realtime.pingpong.messages import Event as EngineEvent
from realtime.pingpong.prefix_cache import prefix_key
from realtime.pingpong.prompt_rows import PromptRows, num_common
from realtime.pingpong.slots import Slots
from realtime.pingpong.steps import Returned
from realtime.pingpong.tenants import (
    CONTEXT_WAITS,
    NOTHING_TO_DO,
    Prefix,
    Segment,
    Span,
    Tenant,
    Turn,
)

logger = logging.getLogger(__name__)
_SETTLE_NS = 4_000_000  # a text and its commit come within 3 ms, an LLM's words ten times that
MAX_WAITING_COMMANDS = 256  # of one slot, a long text's; its neighbours have room of their own


class PrefillLoop:
    """One iteration at a time (`step`), so that tests can drive it without a thread."""

    def __init__(
        self,
        model: SpeechModel,
        cache: KVCache,
        slots: Slots,
        emit: Callable[[EngineEvent], None],
        hand_over: HandOver,
        chunk_positions: int | None,
    ) -> None:
        # A slot's share: its commands, one more that closes it, and its return from decode.
        share = MAX_WAITING_COMMANDS + 2
        self.inbox: Mailbox[Command | Returned] = Mailbox(max_items=share * slots.num_slots)
        self._model = model
        self._emit = emit
        self.hand_over = hand_over
        self._rows = PromptRows(model, cache.max_len)
        self._tenants: dict[int, Tenant] = {}  # served longest ago first
        self._active: dict[int, Tenant] = {}  # those with something to do, and a few more
        self.kv = KvWriter(model, cache, self._tenants, chunk_positions)
        self.settle_ns = _SETTLE_NS if model.device.type == "cuda" else 0
        self.num_received = [0] * slots.num_slots  # commands, by slot

    def run(self, is_stopping: Callable[[], bool]) -> None:
        with torch.inference_mode(), stream_scope(self._model.device, PREFILL_PRIORITY):
            while not is_stopping():
                self.step(wait_s=None)

    def step(self, wait_s: float | None = 0.0) -> bool:
        """Take what has arrived, then do the most urgent work, as much as the model takes at once.
        False when there was none."""
        self.kv.wait_for_call()
        has_work = any(map(self._can_go_on, self._active.values()))
        for message in self.inbox.take_all(0.0 if has_work else self._sleep_s(wait_s)):
            if not isinstance(message, Returned):
                self.num_received[message.slot.idx] += 1
            self.kv.try_again()
            self._guarded(message.slot, partial(self._receive, message))
        tried = None
        for tenant in self._by_urgency():
            if not self.kv.admit(tenant):
                break
            tried = tenant
            self._guarded(tenant.slot, partial(self._advance, tenant))
            if not self.kv.is_stuck(tenant):
                self.kv.try_again()
        if tried is not None and self.kv.runner.takes_many:
            self.kv.flush()  # what fails here concerns everybody
        elif tried is not None:
            self._guarded(tried.slot, self.kv.flush)
        return tried is not None

    def _guarded(self, slot: SlotRef, work: Callable[[], None]) -> None:
        """What one session breaks is that session's end, not its neighbours'. Nor do they wait
        behind a session that wants nothing any more."""
        try:
            work()
        except PromptError as error:  # what the client asked for cannot be made
            self._fail(slot, str(error))
        except Exception as error:
            logger.exception("prefill failed in %s", slot)
            self._fail(slot, f"{type(error).__name__}: {error}")
        tenant = self._tenants.get(slot.idx)
        urgency = NOTHING_TO_DO if tenant is None else tenant.urgency()
        if urgency >= CONTEXT_WAITS:
            self.kv.memory.leave(slot.idx)
        if tenant is None or urgency == NOTHING_TO_DO:
            self._active.pop(slot.idx, None)
        else:
            self._active.setdefault(slot.idx, tenant)
        while self.kv.stripped:  # their open text is to be written again
            stripped = self.kv.stripped.pop()
            self._active.setdefault(stripped.slot.idx, stripped)

    # ------------------------------------------------------------------ messages

    def _receive(self, message: Command | Returned) -> None:
        if isinstance(message, OpenSlot):
            self._open(message)
            return
        tenant = self._tenants.get(message.slot.idx)
        if tenant is None:
            if isinstance(message, CloseSlot):  # closed before it was opened
                self._emit(SlotClosed(message.slot))
            return
        if isinstance(message, Returned):
            self._take_back(tenant, message)
        elif isinstance(message, CancelTurn):
            self._cancel(tenant, message)
        elif isinstance(message, CloseSlot):
            self._close(tenant, message)
        elif message.slot == tenant.slot:
            self._receive_text(tenant, message)

    def _open(self, command: OpenSlot) -> None:
        tenant = self._tenants.get(command.slot.idx)
        if tenant is None:
            tenant = self._tenants[command.slot.idx] = Tenant(command.slot, command.sampling)
        tenant.slot = command.slot
        tenant.opening, tenant.opening_prefix = command, None
        speaks = tenant.turn if tenant.prefix is not None else None
        tenant.opening_after = None if speaks is None else speaks.turn_id
        tenant.opened_at_ns = time.perf_counter_ns()

    def _receive_text(self, tenant: Tenant, message: SetText | EndTurn) -> None:
        if tenant.turn is None:
            tenant.turn = Turn(message.turn_id, start_length=tenant.context_length)
            tenant.last_turn = None
        turn = tenant.turn
        assert turn.turn_id == message.turn_id, (turn.turn_id, message)
        if isinstance(message, EndTurn):
            turn.num_segments = message.num_segments
            self._finish_turn_if_over(tenant)
            return
        if message.segment == len(turn.segments):
            turn.segments.append(Segment())
        segment = turn.segments[message.segment]
        segment.text, segment.is_closed = message.text, message.is_closed
        segment.changed_ns = time.perf_counter_ns()

    def _cancel(self, tenant: Tenant, command: CancelTurn) -> None:
        tenant.slot = command.slot
        turn = tenant.turn or tenant.last_turn
        if turn is None or turn.turn_id != command.turn_id:
            return
        tenant.turn = tenant.last_turn = None
        if tenant.is_decoding:
            tenant.cancelled = (turn, command.heard_frames)
        else:
            self._forget(tenant, turn, command.heard_frames)

    def _close(self, tenant: Tenant, command: CloseSlot) -> None:
        tenant.slot = command.slot
        tenant.is_closing = True
        if not tenant.is_decoding:
            self._drop(tenant)

    def _take_back(self, tenant: Tenant, returned: Returned) -> None:
        assert tenant.is_decoding, returned
        tenant.is_decoding = False
        returned.stepped.wait_on_stream()
        if tenant.is_closing:
            self._drop(tenant)
            return
        tenant.exchanges.append(tenant.context_length)
        tenant.num_in_kv = returned.kv_length
        span = Span(returned.first_kv, returned.kv_length, returned.num_frames)
        if tenant.cancelled is not None:
            (cancelled, heard_frames), tenant.cancelled = tenant.cancelled, None
            cancelled.spans.append(span)
            self._forget(tenant, cancelled, heard_frames)
            return
        self._keep_context(tenant, returned.kv_length)
        turn = tenant.turn
        if turn is None or turn.turn_id != returned.turn_id:  # it has failed meanwhile
            return
        turn.spans.append(span)
        turn.num_frames += returned.num_frames
        turn.next_segment += 1
        self._finish_turn_if_over(tenant)

    # ------------------------------------------------------------------ turns and context

    def _finish_turn_if_over(self, tenant: Tenant) -> None:
        turn = tenant.turn
        if turn is None or not turn.is_over:
            return
        tenant.turn, tenant.last_turn = None, turn
        self._shorten_if_long(tenant)
        self._emit(TurnEnd(tenant.slot, turn.turn_id, turn.num_frames, turn.stamps_ns))

    def _forget(self, tenant: Tenant, turn: Turn, heard_frames: int) -> None:
        """Roll the KV back to the frames that were heard; what was not heard never happened."""
        self._keep_context(tenant, turn.kv_length_heard(heard_frames))
        if tenant.turn is not None:  # text of the next turn has come in the meantime
            tenant.turn.start_length = tenant.context_length

    def _keep_context(self, tenant: Tenant, kv_length: int) -> None:
        is_dialogue = self._model.serving.context == "dialogue"
        tenant.start_context(kv_length if is_dialogue else tenant.prefix_length)
        self.kv.trim(tenant)

    def _shorten_if_long(self, tenant: Tenant) -> None:
        """A dialogue that fills three quarters of its room keeps half, made again before the next
        turn needs it, as it seems."""
        room = self._rows.room_after(tenant.prefix_length)
        if tenant.context_length - tenant.prefix_length > room * 3 // 4:
            self.kv.shorten(tenant, room // 2, self._rows.num_lead)

    def _drop(self, tenant: Tenant) -> None:
        del self._tenants[tenant.slot.idx]
        self.kv.release(tenant)
        self._emit(SlotClosed(tenant.slot))

    def _fail(self, slot: SlotRef, message: str) -> None:
        tenant = self._tenants.get(slot.idx)
        if tenant is not None:
            tenant.opening = tenant.opening_prefix = tenant.turn = None
            tenant.start_context(tenant.context_length)
        self._emit(SlotFailed(slot, message))

    # ------------------------------------------------------------------ work

    def _by_urgency(self) -> Iterator[Tenant]:
        """Closed text first (somebody waits for audio), then new voices, then growing text, then
        what was shortened; among equals, the one that has waited longest."""
        for tenant in sorted(self._active.values(), key=Tenant.urgency):
            if self._can_go_on(tenant):  # as others were served, which may have changed that
                yield tenant

    def _can_go_on(self, tenant: Tenant) -> bool:
        is_wanted = tenant.urgency() != NOTHING_TO_DO and self.kv.is_able(tenant)
        return is_wanted and tenant.settles_in_ns(self.settle_ns) <= 0

    def _sleep_s(self, wait_s: float | None) -> float | None:
        """Until somebody's text has settled, if that is sooner."""
        settling = (tenant.settles_in_ns(self.settle_ns) for tenant in self._active.values())
        waits_s = [ns / 1e9 for ns in settling if ns > 0]
        return min(waits_s + ([] if wait_s is None else [wait_s]), default=None)

    def _has_been_served(self, tenant: Tenant) -> None:
        """Its next piece of work comes after its neighbours'."""
        idx = tenant.slot.idx
        self._tenants[idx] = self._tenants.pop(idx)
        self._active.pop(idx, None)
        if tenant.urgency() != NOTHING_TO_DO:
            self._active[idx] = tenant

    def _advance(self, tenant: Tenant) -> None:
        if tenant.opening is not None and tenant.may_open:
            self._advance_opening(tenant, tenant.opening)
            return
        turn = tenant.turn
        if turn is None or turn.current is None:
            self.kv.restore(tenant, tenant.context_length, is_urgent=False)
            return
        segment = turn.current
        if tenant.prepared != (segment.text, segment.is_closed):
            self._prepare(tenant, turn, segment)
        if tenant.rows is None:  # nothing to say in this segment
            tenant.has_reserved = False
            if segment.is_closed:
                self._skip_segment(tenant, turn)
            return
        num_wanted = tenant.rows.shape[1] - int(segment.is_closed)  # the last row is decode's
        num_reserved = num_wanted + (self._model.serving.max_frames if segment.is_closed else 0)
        length = tenant.context_length + num_reserved
        if not self.kv.restore(tenant, length, is_urgent=segment.is_closed):
            return
        if not self.kv.reserve(tenant, length, is_urgent=segment.is_closed):
            return
        tenant.has_reserved = segment.is_closed
        if segment.is_closed and self._lets_ride(tenant, turn, num_wanted - tenant.num_done):
            return
        stop = self.kv.next_stop(tenant.num_done, num_wanted)
        self.kv.write(tenant, tenant.rows, tenant.context_length, tenant.num_done, stop)
        tenant.num_done = max(tenant.num_done, stop)
        if segment.is_closed and tenant.num_done >= num_wanted:
            self.kv.after(partial(self._hand_over, tenant, turn))

    def _lets_ride(self, tenant: Tenant, turn: Turn, num_rows: int) -> bool:
        """Hand over a slot before its last rows are written, if they can ride with a step of decode."""
        may_ride = self.hand_over.takes_riders(tenant.slot.idx, num_rows)
        if self.kv.is_in_call(tenant) or not may_ride:
            return False
        self.kv.num_positions += num_rows
        self.hand_over.with_riders(tenant, turn, num_rows)
        self._has_been_served(tenant)
        return True

    def _hand_over(self, tenant: Tenant, turn: Turn, prefilled: Event) -> None:
        self.hand_over.give(tenant, turn, prefilled)
        self._has_been_served(tenant)

    def _advance_opening(self, tenant: Tenant, opening: OpenSlot) -> None:
        if tenant.opening_prefix is None:
            rows = self._rows.prefix(opening.voices, opening.prompt)
            tenant.opening_prefix = Prefix(rows, prefix_key(rows))
        prefix = tenant.opening_prefix
        if tenant.prefix is not None and tenant.prefix.key != prefix.key:
            tenant.end_dialogue()
        if not self.kv.load(tenant, prefix, prefix.length):
            return
        tenant.prefix, tenant.opening, tenant.opening_prefix = prefix, None, None
        tenant.start_context(max(tenant.context_length, prefix.length))
        tenant.sampling, tenant.max_lead_ns = opening.sampling, opening.max_lead_ms * 1_000_000
        if tenant.turn is not None:
            tenant.turn.start_length = tenant.context_length
        self._has_been_served(tenant)
        self.kv.after(partial(self._tell_ready, tenant, prefix))

    def _tell_ready(self, tenant: Tenant, prefix: Prefix, _: Event) -> None:
        prefill_ms = (time.perf_counter_ns() - tenant.opened_at_ns) / 1e6
        self._emit(SlotReady(tenant.slot, prefill_ms, prefix.was_cached))

    def checked_prefix_rows(self, voices: tuple[VoicePrompt, ...], prompt: str) -> Tensor:
        """See `PromptRows.prefix`. Callable on any thread."""
        return self._rows.prefix(voices, prompt)

    def _prepare(self, tenant: Tenant, turn: Turn, segment: Segment) -> None:
        """Rows of the segment as it is now; what is in the KV already and still fits is kept."""
        spoken = self._model.front_end(segment.text)
        old = tenant.rows
        if segment.is_closed:
            for warning in spoken.warnings:
                self._emit(EngineWarning(tenant.slot, turn.turn_id, "text_changed", warning))
        if spoken.phonemes.strip():
            tenant.rows = self._segment_rows(tenant, turn, spoken.phonemes, segment.is_closed)
            num_shared = 0 if old is None else num_common(old, tenant.rows)
            tenant.num_done = min(tenant.num_done, num_shared)
        else:
            tenant.rows, tenant.num_done = None, 0
        tenant.prepared = (segment.text, segment.is_closed)

    def _segment_rows(self, tenant: Tenant, turn: Turn, phonemes: str, is_closed: bool) -> Tensor:
        is_first = tenant.context_length == tenant.prefix_length
        made = self._rows.segment(
            phonemes, tenant.context_length, is_first=is_first, is_closed=is_closed
        )
        if made.num_needed > made.room and not is_first:  # the context is full
            num_kept = tenant.context_length - tenant.prefix_length - made.num_needed + made.room
            half = self._rows.room_after(tenant.prefix_length) // 2
            self.kv.shorten(tenant, min(num_kept, half), self._rows.num_lead)
            return self._segment_rows(tenant, turn, phonemes, is_closed)
        if made.num_needed > made.room and is_closed:  # once: it is made anew whenever it has grown
            message = (
                f"the segment needs {made.num_needed} positions, the context has room for "
                f"{made.room}"
            )
            self._emit(EngineWarning(tenant.slot, turn.turn_id, "text_truncated", message))
        return made.rows

    def _skip_segment(self, tenant: Tenant, turn: Turn) -> None:
        self._emit(SegmentEnd(tenant.slot, turn.turn_id, turn.next_segment, 0))
        tenant.prepared = None
        turn.next_segment += 1
        self._finish_turn_if_over(tenant)
        self._has_been_served(tenant)
