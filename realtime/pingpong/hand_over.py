"""A slot whose segment is prefilled goes to decode; the last rows of its prompt may ride along.

Rows that ride go through the model with a step of decode, which reads all weights anyway. In a call
of their own they would be read once more for them; those of many texts are faster in a call.
"""

import time
from collections.abc import Callable, Sequence

import torch

from realtime.pingpong.device import Event
from realtime.pingpong.prefill_rows import Piece
from realtime.pingpong.steps import Join
from realtime.pingpong.tenants import Tenant, Turn

_NUM_STEPS = 2  # whose room is given away: more texts than ride with them are faster in a call


class HandOver:
    """One thread, the prefill thread, uses it."""

    def __init__(
        self,
        device: torch.device,
        join: Callable[[Join], None],
        max_frames: int,
        max_riders: int,
        num_ridden: Callable[[], int],
        is_blocked: Sequence[bool],
    ) -> None:
        """
        Args:
            max_frames: of a segment.
            max_riders: prompt rows that one step of decode takes along.
            num_ridden: how many have been taken along so far.
            is_blocked: by slot, whether no step takes it along for now.
        """
        self.max_riders = max_riders
        self.num_riders = 0  # handed over so far
        self._device = device
        self._join = join
        self._max_frames = max_frames
        self._num_ridden = num_ridden
        self._is_blocked = is_blocked

    def takes_riders(self, slot: int, num_rows: int) -> bool:
        """Whether so many rows of the slot would ride with one of decode's next steps."""
        num_left = _NUM_STEPS * self.max_riders - (self.num_riders - self._num_ridden())
        return 0 < num_rows <= min(num_left, self.max_riders) and not self._is_blocked[slot]

    def with_riders(self, tenant: Tenant, turn: Turn, num_rows: int) -> None:
        """Hand over a slot whose last so many rows are not written; its pages are there."""
        assert tenant.rows is not None, tenant
        start, tenant.num_done = tenant.num_done, tenant.num_done + num_rows
        rows = tenant.rows[:, start : tenant.num_done]
        self.num_riders += num_rows
        written = Event(self._device)
        written.record()  # the slot's pages are in the table
        riders = Piece.of(tenant.slot.idx, tenant.context_length + start, rows)
        self.give(tenant, turn, written, riders)

    def give(
        self, tenant: Tenant, turn: Turn, prefilled: Event, riders: Piece | None = None
    ) -> None:
        """Hand over a slot whose rows are written, but for the riders, once the event is over."""
        assert tenant.rows is not None, tenant
        turn.stamps_ns.setdefault("prefill_done", time.perf_counter_ns())
        tenant.is_decoding = True
        self._join(
            Join(
                slot=tenant.slot,
                turn_id=turn.turn_id,
                segment=turn.next_segment,
                first_frame=turn.num_frames,
                row=tuple(tenant.rows[:, -1].tolist()),
                position=tenant.context_length + tenant.rows.shape[1] - 1,
                sampling=tenant.segment_sampling(turn.next_segment),
                max_frames=self._max_frames,
                max_lead_ns=tenant.max_lead_ns,
                stamps_ns=turn.stamps_ns,
                prefilled=prefilled,
                riders=riders,
                ends_turn=turn.num_segments == turn.next_segment + 1,
            )
        )
