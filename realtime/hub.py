"""Who sits in which slot: admission, the engine's events, readiness, drain. Event loop only.

A slot is taken by one connection from the accepted upgrade until the engine answers `SlotClosed`;
until then no other connection gets it, and every event of the slot goes to that connection.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from enum import Enum

from realtime.audio_encoder import pre_skip_samples
from realtime.config import ServerConfig
from realtime.connection import INTERNAL_ERROR, Connection, Socket
from realtime.egress import Egress, EgressThreads, num_cores
from realtime.egress_processes import EgressProcesses, processes_for
from realtime.encoders import LoopEvent
from realtime.errors import CapacityError, EngineError, PlosiveError, SessionError, VoiceError
from realtime.metrics import Metrics
from realtime.pingpong.api import Engine
from realtime.pingpong.messages import CloseSlot, Command, SlotClosed, SlotRef, VoicePrompt
from realtime.session.core import Session
from realtime.session.limits import SessionLimits
from realtime.session.text_rate import TextRates, burst_chars, charge
from realtime.voices import VoiceStore
from realtime.wire import AudioFormat, EffectiveFormat

_CLOSE_GRACE_S = 1.0  # after the drain deadline, for the closes to be written

logger = logging.getLogger(__name__)


class State(Enum):
    """`READY` admits sessions; the values are what `/ready` gives as the reason."""

    STARTING = "the model is being warmed up"
    READY = "ready"
    DRAINING = "the server is shutting down"
    FAILED = "the engine has failed"


class NotReady(CapacityError):
    default_code = "not_ready"


class Hub:
    """One per server."""

    def __init__(
        self, engine: Engine, config: ServerConfig, voices: VoiceStore, metrics: Metrics
    ) -> None:
        self.state = State.STARTING
        self._engine = engine
        self._config = config
        self._voices = voices
        self._metrics = metrics
        self._limits = SessionLimits(
            max_lead_ms=config.max_lead_ms,
            max_lead_cap_ms=config.max_lead_cap_ms,
            max_text_chars_per_s=config.max_text_chars_per_s,
            auto_flush_ms=config.auto_flush_ms,
            drain_deadline_ms=round(config.drain_s * 1000),
        )
        client_rate = config.client_text_chars_per_s(engine.info.num_slots)
        self._client_text = TextRates(
            "an API key (where there are none: an address)", client_rate, burst_chars(client_rate)
        )
        self.egress = _make_egress(engine, config, self._deliver, metrics)
        self._tenants: dict[int, Connection] = {}  # by slot.idx, until SlotClosed
        self._running: set[Connection] = set()
        self._num_guests = 0
        self.slot_released = asyncio.Event()  # set and cleared at once: wakes who waits for a slot
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._warm_up: asyncio.Task[None] | None = None
        self._is_warm = asyncio.Event()
        self._failure: Exception | None = None
        self._watch_metrics()

    @property
    def num_sessions(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the threads and warm the engine up; `wait_until_ready` tells how it went."""
        loop = asyncio.get_running_loop()
        self.egress.start(loop)
        self._engine.start(self.egress.put)
        self._warm_up = loop.create_task(self._warm())

    async def wait_until_ready(self) -> None:
        """Raises what made the warm-up fail."""
        await self._is_warm.wait()
        if self._failure is not None:
            raise self._failure

    async def _warm(self) -> None:
        try:
            await asyncio.to_thread(self._engine.warm_up, self._default_voices())
        except Exception as error:  # told by `wait_until_ready` and `/ready`
            if not isinstance(error, PlosiveError):  # whose sentence says it all
                logger.exception("the warm-up failed")
            self.state = State.FAILED
            self._failure = error
        if self.state is State.STARTING:
            self.state = State.READY
        self._is_warm.set()

    def _default_voices(self) -> tuple[VoicePrompt, ...]:
        try:
            return (self._voices.get(self._engine.info.default_voice),)
        except VoiceError as error:  # sessions must name a voice, once one has been added
            logger.warning("the model's default voice is missing: %s", error.message)
            return ()

    async def drain(self, deadline_s: float) -> None:
        """No new sessions; let current turns end, until the deadline; then close what is left."""
        self.state = State.DRAINING
        for connection in list(self._running):
            connection.shut_down("shutting_down")
        if self._running:
            logger.warning(
                "sessions that finish their turns: %d; %g s at most, a second signal ends them now",
                len(self._running),
                deadline_s,
            )
        if await self._wait_all_gone(deadline_s):
            return
        logger.warning("sessions closed at the drain deadline: %d", len(self._running))
        for connection in list(self._running):
            connection.fail(PlosiveError("shutting_down", "the server shuts down"))
        await self._wait_all_gone(_CLOSE_GRACE_S)

    async def stop(self) -> None:
        if self.state is not State.FAILED:
            self.state = State.DRAINING
        if self._warm_up is not None:
            await self._warm_up  # its thread cannot be interrupted
        await asyncio.to_thread(self._engine.stop)
        await asyncio.to_thread(self.egress.stop)

    async def _wait_all_gone(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_gone.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------ admission

    def check(self) -> State:
        """The state, after a look at the engine: here one that died idle is found, and a fleet that
        died whole and has an engine again."""
        if self._engine.failure is not None:
            self._fail(EngineError(message=self._engine.failure))
        elif self.state is State.FAILED and self._failure is None:
            logger.warning("the engine is there again")
            self.state = State.READY if self._is_warm.is_set() else State.STARTING
        return self.state

    @property
    def reason(self) -> str:
        """Of the state, in words."""
        num_lost = self._engine.slots.num_lost
        if self.state is not State.READY or not num_lost:
            return self.state.value
        return (
            f"degraded: {num_lost} of {self._engine.info.num_slots} slots are lost with an engine"
        )

    def admit(self) -> SlotRef:
        """A slot for a connection that is about to be accepted. `serve` or `give_back` it.

        Raises:
            CapacityError: `at_capacity`, or `not_ready` while starting, draining or failed.
        """
        if self.check() is not State.READY:
            self._metrics.refused.labels("not_ready").inc()
            raise NotReady(self.state.value)
        slot = self._engine.slots.acquire()
        if slot is None:
            self._metrics.refused.labels("at_capacity").inc()
            raise CapacityError(f"{self._what_is_taken()}; try again shortly")
        self._engine.set_blocked(slot, False)  # whatever the last tenant left
        return slot

    def _what_is_taken(self) -> str:
        num_slots, num_lost = self._engine.info.num_slots, self._engine.slots.num_lost
        if not num_lost:
            return f"all {num_slots} slots are taken"
        return (
            f"all {num_slots - num_lost} slots that are left are taken ({num_lost} of {num_slots} "
            "are lost with an engine that died)"
        )

    def give_back(self, slot: SlotRef) -> None:
        """The upgrade failed after `admit`."""
        self.submit(CloseSlot(self._engine.slots.bump(slot)))

    async def serve(
        self,
        websocket: Socket,
        slot: SlotRef,
        client: str | None,
        find_voice: Callable[[str], VoicePrompt] | None = None,
    ) -> None:
        """Run the accepted connection to its end.

        Args:
            client: who is charged for its text; None where `charge_text` has been called.
            find_voice: replaces the voice store.
        """
        session = Session(
            session_id=secrets.token_hex(8),
            slot=slot,
            info=self._engine.info,
            find_voice=find_voice or self._voices.get,
            limits=self._limits,
            make_seed=lambda: secrets.randbits(63),
            describe_format=_effective_format,
            client_text=None if client is None else self._client_text.account(client),
        )
        connection = Connection(websocket, session, self, self._config, self._metrics)
        self._tenants[slot.idx] = connection
        self._running.add(connection)
        self._all_gone.clear()
        self._metrics.sessions_opened.inc()
        try:
            await connection.run()
        finally:
            self._running.discard(connection)
            self._look_if_all_gone()

    def charge_text(self, client: str, num_chars: int) -> None:
        """For all that a request has to be read, before any of it is.

        Raises:
            CapacityError: `text_rate_exceeded`.
            SessionError: `text_too_long`: so much is never taken at once.
        """
        most = self._client_text.most_at_once
        if num_chars > most:
            message = (
                f"text, prompt and references have {num_chars:,} characters together; at most "
                f"{most:,.0f} are taken at once"
            )
            raise SessionError("text_too_long", message, param="text")
        charge([self._client_text.account(client)], num_chars, time.perf_counter_ns())

    @contextlib.contextmanager
    def guest(self) -> Iterator[None]:
        """A drain waits for whoever is in here: for what has still to go from a session in memory
        to the client behind it."""
        self._num_guests += 1
        self._all_gone.clear()
        try:
            yield
        finally:
            self._num_guests -= 1
            self._look_if_all_gone()

    def _look_if_all_gone(self) -> None:
        if not self._running and not self._num_guests:
            self._all_gone.set()

    # ------------------------------------------------------------------ towards the engine

    def submit(self, command: Command) -> None:
        """Raises EngineError; code `engine_overloaded` means later."""
        try:
            self._engine.submit(command)
        except EngineError as error:
            if error.code != "engine_overloaded":
                self._fail(error)
            raise

    def set_blocked(self, slot: SlotRef, is_blocked: bool) -> None:
        self._engine.set_blocked(slot, is_blocked)

    def bump(self, slot: SlotRef) -> SlotRef:
        return self._engine.slots.bump(slot)

    def open_encoder(self, slot: SlotRef, audio_format: AudioFormat) -> None:
        self.egress.open_encoder(slot, audio_format)

    # ------------------------------------------------------------------ from the engine

    def _deliver(self, event: LoopEvent) -> None:
        connection = self._tenants.get(event.slot.idx)
        try:
            if isinstance(event, SlotClosed):
                self._release(event)
            elif connection is not None:
                connection.engine_event(event)
        except Exception:  # the events behind this one are other sessions'
            logger.exception("%s of slot %s", type(event).__name__, event.slot)
            if connection is not None:
                connection.fail(PlosiveError("internal_error", INTERNAL_ERROR))

    def _release(self, event: SlotClosed) -> None:
        self._tenants.pop(event.slot.idx, None)
        self._engine.slots.release(event.slot)
        self.slot_released.set()
        self.slot_released.clear()

    def _fail(self, error: EngineError) -> None:
        """The engine is gone, and with it every slot, until `check` finds that it lives; a supervisor
        sees it at `/health`."""
        if self.state in (State.STARTING, State.READY):
            logger.error("the engine has failed: %s", error.message)
            self.state = State.FAILED

    def _watch_metrics(self) -> None:
        info, slots, watch = self._engine.info, self._engine.slots, self._metrics.watch
        watch("slots", "Sessions that can be served at the same time", lambda: info.num_slots)
        watch("slots_free", "Slots without a session", lambda: slots.num_free)
        watch("encoders", "Open encoders", lambda: self.egress.num_encoders)
        watch("egress_queue", "Engine events to be encoded", lambda: self.egress.num_queued)
        watch("ready", "1 when sessions are admitted", lambda: self.check() is State.READY)
        self._metrics.sessions.set_function(lambda: self.num_sessions)
        self._metrics.watch_all("engine", self._engine.stats)


def _make_egress(
    engine: Engine,
    config: ServerConfig,
    deliver: Callable[[LoopEvent], None],
    metrics: Metrics,
) -> Egress:
    info, slots = engine.info, engine.slots
    num_processes = config.encode_processes
    if num_processes is None:
        num_processes = processes_for(slots, info.num_slots, num_cores())
    if num_processes:
        return EgressProcesses(info.sample_rate, slots, deliver, metrics, num_processes)
    return EgressThreads(info.sample_rate, info.num_slots, slots, deliver, metrics)


def _effective_format(audio_format: AudioFormat) -> EffectiveFormat:
    return EffectiveFormat(
        codec=audio_format.codec,
        sample_rate=audio_format.sample_rate,
        pre_skip_samples=pre_skip_samples(audio_format),
        lead_in_ms=audio_format.lead_in_ms,
    )
