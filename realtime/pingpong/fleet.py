"""Several engines, one per device, behind one listener: an engine made of engines.

A slot of the fleet is bound to a slot of one engine from the moment it is acquired, to the engine
with the most free slots. When it is opened, and so its voice is known, it moves to an engine that has
the voice's prefix already, if that one is about as free. Generations of both slots count in step, so
a reference translates by adding a constant.

An engine that dies fails its own sessions; the others go on, and no new session is placed on it. Where
the fleet can make engines (`revive`), another takes its place (see `restarts`): it is a new member, at a
new index, and the dead one keeps the sessions that it had until they are closed. While an engine is
missing its slots count as lost. When none is left that lives, the fleet has failed.
"""

import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from realtime.errors import EngineError, PlosiveError
from realtime.pingpong.api import Engine, EngineInfo
from realtime.pingpong.messages import (
    CloseSlot,
    Command,
    Event,
    OpenSlot,
    SlotClosed,
    SlotFailed,
    SlotRef,
    VoicePrompt,
)
from realtime.pingpong.restarts import Deadline, Newcomer, Pauses, Restarts
from realtime.pingpong.slots import Generations, Slots
from realtime.threads import name_thread

_EVEN_SHARE = 1 / 8  # engines whose shares of free slots differ by less count as equally free
_MAX_PREFIXES = 256  # remembered of each engine


@dataclass
class _Binding:
    """A fleet's slot and its engine's; `offset` is the engine's generation minus the fleet's."""

    engine: int
    idx: int
    offset: int
    is_opened: bool = False

    def local(self, slot: SlotRef) -> SlotRef:
        return SlotRef(self.idx, slot.generation + self.offset)


class FleetSlots(Slots):
    """The engines' slots as one table. Event loop only, as every `SlotTable`."""

    def __init__(self, engines: Sequence[Engine], generations: Generations | None) -> None:
        super().__init__(sum(engine.info.num_slots for engine in engines), generations)
        self._engines: list[Engine] = []
        self._bindings: dict[int, _Binding] = {}  # by the fleet's slot.idx
        self._back: list[list[int]] = []  # of each engine: which of our slots had its slot last
        self._replaced: set[int] = set()
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine, instead_of: int | None = None) -> None:
        """One more to place sessions on. Callable from any thread, one at a time."""
        self._back.append([-1] * engine.info.num_slots)
        if instead_of is not None:
            self._replaced.add(instead_of)
        self._engines.append(engine)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_free(self) -> int:
        """Of the engines that live."""
        return sum(engine.slots.num_free for engine in self._engines if engine.failure is None)

    @property
    def num_lost(self) -> int:
        dead = (e for i, e in enumerate(self._engines) if e.failure and i not in self._replaced)
        return sum(engine.info.num_slots for engine in dead)

    def acquire(self) -> SlotRef | None:
        idx = self.most_free()
        slot = super().acquire() if idx is not None else None
        if idx is None or slot is None:
            return None
        self._bind(slot, idx)
        return slot

    def bump(self, slot: SlotRef) -> SlotRef:
        binding = self._bindings[slot.idx]
        self._engines[binding.engine].slots.bump(binding.local(slot))
        return super().bump(slot)

    def release(self, slot: SlotRef) -> None:
        binding = self._bindings.pop(slot.idx)
        self._engines[binding.engine].slots.release(binding.local(slot))
        super().release(slot)

    def binding(self, slot: SlotRef) -> _Binding:
        return self._bindings[slot.idx]

    def of_engine(self, engine_idx: int, slot: SlotRef) -> SlotRef | None:
        """The fleet's reference for an engine's slot, if it is bound. Callable from any thread."""
        if engine_idx >= len(self._back):  # it is being warmed up
            return None
        idx = self._back[engine_idx][slot.idx]
        binding = self._bindings.get(idx)
        if binding is None or (binding.engine, binding.idx) != (engine_idx, slot.idx):
            return None
        return SlotRef(idx, slot.generation - binding.offset)

    def move(self, slot: SlotRef, engine_idx: int) -> None:
        """To an engine with a free slot, before any command for the slot was given to another."""
        binding = self._bindings[slot.idx]
        assert not binding.is_opened, slot
        self._engines[binding.engine].slots.release(binding.local(slot))
        self._bind(slot, engine_idx)

    def most_free(self, among: Sequence[int] | None = None) -> int | None:
        """The engine that lives and has the largest share of its slots free, and at least one."""
        indices = range(len(self._engines)) if among is None else among
        best = max(indices, key=self.free_share, default=None)
        return best if best is not None and self.free_share(best) > 0.0 else None

    def free_share(self, engine_idx: int) -> float:
        engine = self._engines[engine_idx]
        is_alive = engine.failure is None
        return engine.slots.num_free / engine.info.num_slots if is_alive else 0.0

    def _bind(self, slot: SlotRef, engine_idx: int) -> None:
        local = self._engines[engine_idx].slots.acquire()
        assert local is not None, engine_idx
        offset = local.generation - slot.generation
        self._bindings[slot.idx] = _Binding(engine_idx, local.idx, offset)
        self._back[engine_idx][local.idx] = slot.idx


class Fleet:
    """Implements `realtime.pingpong.api.Engine` over engines of one model."""

    def __init__(
        self,
        engines: Sequence[Engine],
        generations: Generations | None = None,
        *,
        revive: Callable[[int], Newcomer] | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """
        Args:
            generations: of all the engines' slots, where other processes are to read them.
            revive: starts making an engine like the one at an index of `engines`, with as many slots.
        """
        assert engines, "a fleet needs an engine"
        first = engines[0].info
        for engine in engines:
            _check_same_model(engine, first)
        self._engines = list(engines)
        self._members = list(range(len(engines)))  # by place: the index of the engine that is there
        self._slots = FleetSlots(engines, generations)
        self._info = replace(first, num_slots=self._slots.num_slots)
        self._prefixes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in engines]
        self._voices: tuple[VoicePrompt, ...] = ()
        self._restarts = (
            Restarts(self._current, self._bury, revive, self._welcome, pauses or Pauses())
            if revive
            else None
        )
        self._arriving = threading.Lock()
        self._closing: dict[SlotRef, int] = {}  # not answered yet: by which engine
        self._sink: Callable[[Event], None] = lambda event: None
        self._own_events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="plosive-fleet", daemon=True)

    # ------------------------------------------------------------------ Engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def slots(self) -> FleetSlots:
        return self._slots

    @property
    def failure(self) -> str | None:
        """Of the last one to fail."""
        failures = [engine.failure for engine in self._current()]
        return None if None in failures else "; ".join(str(failure) for failure in failures)

    def start(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        self._teller.start()
        for idx, engine in enumerate(self._engines):
            engine.start(partial(self._hear, idx))
        if self._restarts is not None:
            self._restarts.start()

    def submit(self, command: Command) -> None:
        binding = self._slots.binding(command.slot)
        if isinstance(command, OpenSlot):
            binding = self._place(command)
        engine = self._engines[binding.engine]
        if isinstance(command, CloseSlot):  # before it can be answered
            self._closing[command.slot] = binding.engine
        try:
            engine.submit(replace(command, slot=binding.local(command.slot)))
        except EngineError as error:
            is_lost = self.failure is not None and self._restarts is None
            if error.code == "engine_overloaded" or is_lost:
                raise
            if isinstance(command, CloseSlot):
                self._answer_close(command.slot)
            else:
                self._own_events.put(SlotFailed(command.slot, error.message))

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        if not self._slots.is_current(slot):
            return
        binding = self._slots.binding(slot)
        self._engines[binding.engine].set_blocked(binding.local(slot), is_blocked)

    def warm_up(self, voices: tuple[VoicePrompt, ...]) -> None:
        """All engines at the same time."""
        self._voices = voices
        with ThreadPoolExecutor(len(self._engines)) as pool:
            list(pool.map(lambda engine: engine.warm_up(voices), self._engines))
        for prefixes in self._prefixes:
            for voice in voices:
                _remember(prefixes, _key((voice,), ""))

    def encode_voice(self, clip: bytes, max_seconds: float) -> NDArray[np.int32]:
        return self._any_alive().encode_voice(clip, max_seconds)

    def check_voice(self, voice: VoicePrompt) -> None:
        self._any_alive().check_voice(voice)

    def stats(self) -> dict[str, float]:
        """Sums; of percentiles, and of what took how long at start, the largest."""
        total: dict[str, float] = {}
        for engine in self._current():
            for name, value in engine.stats().items():
                unit, known = name.rpartition("_")[2], total.get(name, 0.0)
                is_largest = unit.startswith("p") or unit == "s"
                total[name] = max(known, value) if is_largest else known + value
        num_alive = sum(engine.failure is None for engine in self._current())
        num_restarts = len(self._engines) - len(self._members)
        counts = {"engines": len(self._members), "engines_alive": num_alive}
        return total | counts | {"restarts": num_restarts}

    def stop(self) -> None:
        if self._restarts is not None:
            self._restarts.stop()
        for engine in self._engines:
            engine.stop()
        self._own_events.put(None)
        if self._teller.is_alive() and self._teller is not threading.current_thread():
            self._teller.join()

    # ------------------------------------------------------------------ members

    def _current(self) -> list[Engine]:
        """By place, living or not."""
        return [self._engines[idx] for idx in self._members]

    def _bury(self, place: int) -> None:
        """On the thread of the restarts: end the dead engine of a place, and answer the closes that
        it took and never answered. Whoever takes a close out of `_closing` answers it, nobody else."""
        idx = self._members[place]
        self._engines[idx].stop()  # it takes no more
        for slot, engine_idx in list(self._closing.items()):
            if engine_idx == idx:
                self._answer_close(slot)

    def _answer_close(self, slot: SlotRef) -> None:
        """For a dead engine: no thread touches its slots any more."""
        if self._closing.pop(slot, None) is not None:
            self._own_events.put(SlotClosed(slot))

    def _welcome(self, place: int, engine: Engine, deadline: Deadline) -> None:
        """On the thread of the restarts of that place: `engine` is loaded. Sessions come to it when it
        is warm; others may come in meanwhile.

        Raises:
            PlosiveError: it died or is late, or is of another model than the others.
        """
        try:
            _check_same_model(engine, self._info)
        except AssertionError as error:
            raise PlosiveError("model_unusable", str(error)) from error
        index: list[int] = []  # its own; empty until it is a member, of whom nobody has a slot

        def hear(event: Event) -> None:
            if index:
                self._hear(index[0], event)

        engine.start(hear)
        engine.warm_up(self._voices)
        with self._arriving:
            deadline.meet()
            index.append(len(self._engines))
            self._prefixes.append(OrderedDict((_key((voice,), ""), None) for voice in self._voices))
            self._engines.append(engine)
            self._slots.add(engine, instead_of=self._members[place])
            self._members[place] = index[0]

    # ------------------------------------------------------------------ placement

    def _place(self, command: OpenSlot) -> _Binding:
        """Where the slot is opened: once, then it stays."""
        slot, slots = command.slot, self._slots
        binding = slots.binding(slot)
        key = _key(command.voices, command.prompt)
        if not binding.is_opened:
            target = self._target(binding.engine, key)
            if target != binding.engine:
                slots.move(slot, target)
                binding = slots.binding(slot)
                self._engines[target].set_blocked(binding.local(slot), False)
            binding.is_opened = True
        _remember(self._prefixes[binding.engine], key)
        return binding

    def _target(self, bound: int, key: bytes) -> int:
        """The engine that the slot is bound to counts its slot as free."""
        is_alive = self._engines[bound].failure is None
        own_share = self._slots.free_share(bound) + 1 / self._engines[bound].info.num_slots
        if is_alive and key in self._prefixes[bound]:
            return bound
        floor = own_share - _EVEN_SHARE if is_alive else 0.0
        having = [
            idx
            for idx, prefixes in enumerate(self._prefixes[: self._slots.num_engines])
            if key in prefixes and self._slots.free_share(idx) > max(0.0, floor)
        ]
        best = self._slots.most_free(having)
        if best is None and not is_alive:
            best = self._slots.most_free()
        return bound if best is None else best

    def _any_alive(self) -> Engine:
        idx = max(range(len(self._engines)), key=lambda i: self._engines[i].failure is None)
        return self._engines[idx]

    # ------------------------------------------------------------------ events

    def _hear(self, engine_idx: int, event: Event) -> None:
        """On the engine's thread. What it says of a slot that it no longer has is nobody's: an engine
        that dies may name slots that were closed long ago."""
        slot = self._slots.of_engine(engine_idx, event.slot)
        if slot is None:
            return
        if isinstance(event, SlotClosed) and self._closing.pop(slot, None) is None:
            return  # `_bury` has answered for it
        self._sink(replace(event, slot=slot))

    def _tell(self) -> None:
        """The fleet's own events: the event loop, which causes them, must not wait for the sink."""
        name_thread("plosive-fleet")
        while (event := self._own_events.get()) is not None:
            self._sink(event)


def _check_same_model(engine: Engine, info: EngineInfo) -> None:
    same = replace(engine.info, num_slots=info.num_slots)
    assert same == info, f"engines of different models: {engine.info}, {info}"


def _key(voices: tuple[VoicePrompt, ...], prompt: str) -> bytes:
    """Of all that a prefix is made from."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16)
    for voice in voices:
        digest.update(b"\0" + voice.text.encode("utf-8", "surrogatepass") + b"\0")
        digest.update(np.ascontiguousarray(voice.codes).tobytes())
    return digest.digest()


def _remember(prefixes: "OrderedDict[bytes, None]", key: bytes) -> None:
    prefixes[key] = None
    prefixes.move_to_end(key)
    if len(prefixes) > _MAX_PREFIXES:
        prefixes.popitem(last=False)
