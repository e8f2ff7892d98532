"""A Pipecat pipeline of one speech service between two listeners."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipecat.frames.frames import (
    CancelFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.tts_service import TTSService
from pipecat.workers.runner import WorkerRunner

TIMEOUT_S = 10.0


class Ear(FrameProcessor):
    """Keeps what reaches it, and lets a test wait for something."""

    def __init__(self) -> None:
        super().__init__(enable_direct_mode=True)
        self.frames: list[Frame] = []
        self._arrived = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        self._arrived.set()
        await self.push_frame(frame, direction)

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_there():
                self._arrived.clear()
                await self._arrived.wait()

    def of(self, *kinds: type) -> list:
        return [frame for frame in self.frames if isinstance(frame, kinds)]

    @property
    def audio(self) -> bytes:
        return b"".join(frame.audio for frame in self.of(TTSAudioRawFrame))


@dataclass
class Talk:
    """A running pipeline: errors and what speaks are at `upstream` and `downstream`."""

    tts: TTSService
    worker: PipelineWorker
    upstream: Ear
    downstream: Ear
    cancelled: list = field(default_factory=list)

    async def reply(self, *tokens: str) -> None:
        """What a language model's reply looks like to the service."""
        await self.send(LLMFullResponseStartFrame())
        await self.send(*map(LLMTextFrame, tokens))
        await self.send(LLMFullResponseEndFrame())

    async def send(self, *frames: Frame) -> None:
        for frame in frames:
            await self.worker.queue_frame(frame)

    async def until_stopped(self, num_turns: int) -> None:
        await self.downstream.until(lambda: len(self.downstream.of(TTSStoppedFrame)) >= num_turns)


@asynccontextmanager
async def piped(tts: TTSService) -> AsyncIterator[Talk]:
    upstream, downstream = Ear(), Ear()
    worker = PipelineWorker(
        Pipeline([upstream, tts, downstream]),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
        params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def on_started(worker, frame) -> None:
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await started.wait()
        yield Talk(tts, worker, upstream, downstream)
    finally:
        await worker.queue_frame(CancelFrame())
        async with asyncio.timeout(TIMEOUT_S):
            await running
