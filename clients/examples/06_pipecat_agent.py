"""A Pipecat pipeline that speaks with Plosive: a reply, a barge-in and a second reply, into a file.

`Writer` stands where a real agent has its speech recognition and language model, `Recorder` where
it has `transport.output()`. Needs a server, `plosive serve`, and `pip install -e ".[pipecat]"`.

    python clients/examples/06_pipecat_agent.py [URL] [FILE]
"""

import asyncio
import sys
import wave

try:
    from pipecat.frames.frames import (
        EndFrame,
        ErrorFrame,
        Frame,
        InterruptionFrame,
        LLMFullResponseEndFrame,
        LLMFullResponseStartFrame,
        LLMTextFrame,
        TranscriptionFrame,
        TTSAudioRawFrame,
        TTSStoppedFrame,
    )
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.worker import PipelineParams, PipelineWorker
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
    from pipecat.workers.runner import WorkerRunner

    from clients.adapters.pipecat import PlosiveTTSService
except ModuleNotFoundError:
    sys.exit('Pipecat is not installed; in a clone of Plosive: pip install -e ".[pipecat]"')

SAMPLE_RATE_HZ = 24_000
REPLIES = {
    "Tell me a story.": "Once upon a time there was a small town where nothing ever happened.",
    "Wait, what is your name?": "Sorry. My name is Plosive.",
}


class Writer(FrameProcessor):
    """Writes a reply to what the user has said, word by word."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, TranscriptionFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        for word in REPLIES[frame.text].split(" "):
            await self.push_frame(LLMTextFrame(word + " "))
        await self.push_frame(LLMFullResponseEndFrame())


class Recorder(FrameProcessor):
    """Writes the audio to a file, and tells when a reply began and when it was complete."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self._file = wave.open(path, "wb")  # noqa: SIM115 - closed with the pipeline
        self._file.setparams((1, 2, SAMPLE_RATE_HZ, 0, "NONE", ""))

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame(audio=audio):
                self._file.writeframes(audio)
                self.began.set()
            case TTSStoppedFrame():
                self.ended.set()
            case InterruptionFrame():
                self.ended.clear()
            case EndFrame():
                self._file.close()
        await self.push_frame(frame, direction)


async def main(url: str, path: str) -> None:
    tts = PlosiveTTSService(url=url)
    recorder = Recorder(path)
    worker = PipelineWorker(
        Pipeline([Writer(), tts, recorder]),
        params=PipelineParams(audio_out_sample_rate=SAMPLE_RATE_HZ, enable_metrics=True),
    )

    @tts.event_handler("on_turn_cancelled")
    async def on_turn_cancelled(service: object, context_id: str, account: object) -> None:
        print(f"cancelled: {account}")

    @worker.event_handler("on_pipeline_started")
    async def on_started(worker: PipelineWorker, frame: Frame) -> None:
        first, second = REPLIES
        await worker.queue_frame(TranscriptionFrame(first, "user", ""))
        await recorder.began.wait()
        await worker.queue_frame(InterruptionFrame())
        await worker.queue_frame(TranscriptionFrame(second, "user", ""))
        await recorder.ended.wait()
        await worker.queue_frame(EndFrame())

    errors: list[str] = []

    @worker.event_handler("on_pipeline_error")
    async def on_error(worker: PipelineWorker, frame: ErrorFrame) -> None:
        errors.append(frame.error)
        recorder.began.set()  # nothing is waited for any more
        recorder.ended.set()

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await runner.run()
    if errors:
        sys.exit(errors[0])
    print(f"saved {path}")


if __name__ == "__main__":
    defaults = ["http://localhost:8765", "agent.wav"]
    arguments = sys.argv[1:]
    asyncio.run(main(*arguments, *defaults[len(arguments) :]))
