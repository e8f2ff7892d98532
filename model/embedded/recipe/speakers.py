"""Who speaks: the ten voices of the package, or any number of speakers nobody has met before.

A style of the teacher is a table `[tokens, 256]`: the first half of a row is timbre, the second prosody. Convex blends
of such tables are natural voices again, so a few dozen of them make as many speakers as one likes. Blends lie between
their styles, nearer to the mean than any of them; a crossed speaker takes some dimensions of its timbre from one blend and
the others from a second, which lies as far out as the styles themselves and on none of their lines. The fundamental and the
length of the vocal tract are varied besides. Everything follows from the seed.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

#: The order is the voice index in the shards. Every voice speaks the same share of the corpus.
VOICES = (
    "af_heart",
    "af_bella",
    "af_sarah",
    "af_kore",
    "am_michael",
    "am_fenrir",
    "am_puck",
    "bf_emma",
    "bm_george",
    "bm_fable",
)
#: Never spoken and in no blend: the evaluation's strangers.
UNSEEN = ("af_sky", "am_adam", "bf_isabella", "bm_lewis")
ENGLISH = ("a", "b")
#: Shares of the blends with one, two and three timbres, and of those that mix the sexes.
NUM_TIMBRES = (0.2, 0.5, 0.3)
MIXED_SEX = 0.1
MAX_PITCH_SEMITONES = 2.0
MAX_TRACT = 0.1
PLAIN_SHARE = 0.4
NUM_BLENDS = 800  # invented speakers after these are crossed
TIMBRE_DIMS = 128
CROSSED_NUM_TIMBRES = (0.6, 0.3, 0.1)

Parts = tuple[tuple[str, float], ...]  # names of styles with weights that sum to 1


class Speaker(NamedTuple):
    timbre: Parts
    prosody: Parts
    pitch: float = 1.0  # factor on the fundamental
    tract: float = 1.0  # factor on the length of the vocal tract: formants and fundamental over it
    crossed: Parts = ()  # another timbre, of the dimensions whose bits are set in `mask`
    mask: int = 0


def plain(name: str) -> Speaker:
    return Speaker(((name, 1.0),), ((name, 1.0),))


def invent(names: Sequence[str], count: int, seed: int) -> list[Speaker]:
    """`count` speakers from the styles `names` but for `UNSEEN`, no two alike; those after
    `NUM_BLENDS` are crossed.

    Timbres come from styles of every language, the prosody of one of English: what they say is English.
    """
    rng = random.Random(seed)
    pool = sorted(set(names) - set(UNSEEN))
    speakers: dict[Speaker, None] = {}  # a set in the order of its making
    while len(speakers) < count:
        speakers.setdefault(_speaker(pool, rng, len(speakers) >= NUM_BLENDS))
    return list(speakers)


def _speaker(pool: Sequence[str], rng: random.Random, is_crossed: bool) -> Speaker:
    first = rng.choice(pool)
    same_sex = [name for name in pool if name[1] == first[1]]
    others = pool if rng.random() < MIXED_SEX else same_sex
    numbers = CROSSED_NUM_TIMBRES if is_crossed else NUM_TIMBRES
    timbre, crossed, mask = _blend(first, others, numbers, rng), (), 0
    if is_crossed:
        second = rng.choice([name for name in others if name != first])
        crossed = _blend(second, others, numbers, rng)
        mask = rng.getrandbits(TIMBRE_DIMS)  # half of the dimensions, or a quarter
        mask &= rng.choice((-1, rng.getrandbits(TIMBRE_DIMS)))
    prosody = rng.choice([name for name in same_sex if name[0] in ENGLISH])
    pitch = tract = 1.0
    if rng.random() >= PLAIN_SHARE:
        pitch = round(2 ** (rng.uniform(-1, 1) * MAX_PITCH_SEMITONES / 12), 3)
        tract = round(1 + rng.uniform(-1, 1) * MAX_TRACT, 3)
    return Speaker(timbre, ((prosody, 1.0),), pitch, tract, crossed, mask)


def _blend(
    first: str, others: Sequence[str], numbers: Sequence[float], rng: random.Random
) -> Parts:
    """`first` and none to two of the `others`; `numbers`: shares of one, two and three timbres"""
    (number,) = rng.choices((1, 2, 3), numbers)
    timbres = [first, *rng.sample([name for name in others if name != first], number - 1)]
    shares = [rng.gammavariate(1.0, 1.0) for _ in timbres]
    weights = [round(share / sum(shares), 3) for share in shares[1:]]
    return tuple(zip(timbres, [round(1 - sum(weights), 3), *weights], strict=True))
