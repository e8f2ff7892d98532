"""Segments: where they end, that nothing is lost, and that the split of the appends is no matter."""

import random
import time

import pytest

from realtime.session.segmenter import Segment, Segmenter, SegmentPolicy

POLICY = SegmentPolicy(max_chars=120, min_chars=1, first_clause_chars=1_000)
NEXT = " Then came the next one."

WHOLE = [  # one sentence each: no segment ends before their last character
    "It weighs 3.14 kilos.",
    "The price is $29.50 today.",
    "He got 10.000.000 of them.",
    "Dr. Smith met Mr. and Mrs. Jones.",
    "We met Prof. Ada Lovelace.",
    "J. R. R. Tolkien wrote it.",
    "Use a tool, e.g. a hammer.",
    "That is, i.e. the same.",
    "Apples, pears, etc. are fine.",
    "Come at 3 p.m. or later.",
    "The U.S. is far.",
    "The U.S. Army is here, incl. Bob.",
    "See No. 5 on page 7.",
    "See fig. 3 for it.",
    "Ask at www.example.com for it.",
    "Open https://a.example.org/x?y=1.5&z=2 now.",
    "Write to jane.doe@example.com now.",
    "Version 2.0.1 is out.",
    "Well... maybe not.",
    "Well\u2026 maybe not.",
    'He said "Go." and left.',
    "Is it (really?) so.",
    "He ran (fast!) to school.",
    "<|speaker:1.05|> It works.",
    "[sighs. Deeply!] It works.",
    "It is 10:30 now.",
    "The file is a.txt and more.",
    "Hello!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u300c\u597d\u5417\uff1f\u300d",
]

SPLIT = [  # (text, the sentences in it)
    ("One. Two.", ["One.", "Two."]),
    ("Really? Yes!", ["Really?", "Yes!"]),
    ("Wait... What is it?", ["Wait...", "What is it?"]),
    ('"Go." He left.', ['"Go."', "He left."]),
    ("(It rained.) We stayed.", ["(It rained.)", "We stayed."]),
    ("At 3 p.m. We met.", ["At 3 p.m.", "We met."]),
    ("Cats, etc. Dogs too.", ["Cats, etc.", "Dogs too."]),
    ("So do I. Fine.", ["So do I.", "Fine."]),
    ("It was 1999. He left.", ["It was 1999.", "He left."]),
    ("I said no. Then I left.", ["I said no.", "Then I left."]),
    ("It costs $3. Cheap.", ["It costs $3.", "Cheap."]),
    ("I am your assistant.How are you?", ["I am your assistant.", "How are you?"]),
    ("hello there. how are you.", ["hello there.", "how are you."]),
    ("First line\n\nSecond line", ["First line", "Second line"]),
    ("List:\n- one\n- two\n3. three", ["List:", "- one", "- two", "3. three"]),
    ("A hard\nwrap. Next.", ["A hard\nwrap.", "Next."]),
    ("Windows\r\n\r\nlines", ["Windows", "lines"]),
    ("\u4f60\u597d\u3002\u518d\u89c1\u3002", ["\u4f60\u597d\u3002", "\u518d\u89c1\u3002"]),
    (
        "\u300c\u597d\u3002\u300d\u4ed6\u8bf4\u3002",
        ["\u300c\u597d\u3002\u300d", "\u4ed6\u8bf4\u3002"],
    ),
    (
        "\u0645\u0631\u062d\u0628\u0627\u061f \u0646\u0639\u0645",
        ["\u0645\u0631\u062d\u0628\u0627\u061f", "\u0646\u0639\u0645"],
    ),
    (
        "\u0928\u092e\u0938\u094d\u0924\u0947\u0964 \u0939\u093e\u0901",
        ["\u0928\u092e\u0938\u094d\u0924\u0947\u0964", "\u0939\u093e\u0901"],
    ),
    ("Go. [laugh] Ha ha. <|pause|> No.", ["Go.", "[laugh] Ha ha.", "<|pause|> No."]),
    ("*** \u2014 ... Hi. \u2022", ["*** \u2014 ... Hi."]),
]


def segments_of(pieces, policy=POLICY) -> list[Segment]:
    segmenter = Segmenter(policy)
    closed = [segment for piece in pieces for segment in segmenter.append(piece)]
    return closed + segmenter.flush()


def texts_of(text: str, policy: SegmentPolicy = POLICY) -> list[str]:
    return [segment.text for segment in segments_of([text], policy)]


def random_pieces(text: str, rng: random.Random) -> list[str]:
    num_cuts = rng.randint(0, min(len(text), 30))
    cuts = sorted(rng.randint(0, len(text)) for _ in range(num_cuts))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("text", WHOLE)
def test_a_sentence_stays_whole(text):
    assert texts_of(text + NEXT) == [text, NEXT.strip()]


@pytest.mark.parametrize(("text", "sentences"), SPLIT)
def test_sentences_are_parted(text, sentences):
    assert texts_of(text) == sentences


@pytest.mark.parametrize(
    "text", [case + NEXT for case in WHOLE] + [text for text, _ in SPLIT] + [" ".join(WHOLE)]
)
@pytest.mark.parametrize("max_chars", [120, 17])
def test_the_split_of_the_appends_is_no_matter(text, max_chars):
    policy = SegmentPolicy(max_chars=max_chars, min_chars=8, first_clause_chars=10)
    expected = segments_of([text], policy)
    assert segments_of(list(text), policy) == expected
    rng = random.Random(text)
    for _ in range(20):
        assert segments_of(random_pieces(text, rng), policy) == expected


def test_random_soup_keeps_every_promise():
    rng = random.Random(1)
    atoms = [
        *"ab. .,!?\n\"')]([<|>1$\u3002\u597d\u201d\u2026\u2014;:\0\ud800",
        "Mr. ",
        "p.m. ",
        "[a]",
        "<|x|>",
        "  ",
    ]
    for _ in range(300):
        text = "".join(rng.choices(atoms, k=rng.randint(0, 120)))
        policy = SegmentPolicy(rng.randint(1, 40), rng.randint(1, 12), rng.randint(1, 20))
        segments = segments_of([text], policy)
        assert segments_of(random_pieces(text, rng), policy) == segments, text
        ends = [segment.end for segment in segments]
        assert ends == sorted(set(ends)) and all(0 < end <= len(text) for end in ends)
        assert all(0 < len(segment.text) <= policy.max_chars for segment in segments), text
        spoken = "".join(char for segment in segments for char in segment.text)
        for char in "ab1\u597d":  # whatever can be said is said, once and in order
            assert spoken.count(char) == text.count(char), text


def test_the_first_segment_closes_before_the_text_ends():
    segmenter = Segmenter(SegmentPolicy(max_chars=200, min_chars=16, first_clause_chars=20))
    assert segmenter.append("Sure") == []
    assert segmenter.append("!") == []
    assert [segment.text for segment in segmenter.append(" I")] == ["Sure!"]
    assert segmenter.append(" will look that up for you, so please hold on. No") != []


def test_the_first_segment_may_be_a_long_clause_and_later_ones_may_not():
    policy = SegmentPolicy(max_chars=200, min_chars=1, first_clause_chars=10)
    text = "When you get home, call me, please. When I get home, I sleep."
    assert texts_of(text, policy) == [
        "When you get home,",
        "call me, please.",
        "When I get home, I sleep.",
    ]


def test_short_sentences_are_joined_except_the_first_and_the_last():
    policy = SegmentPolicy(max_chars=200, min_chars=12, first_clause_chars=100)
    assert texts_of("Yes. No. Well, perhaps it is. Go.", policy) == [
        "Yes.",
        "No. Well, perhaps it is.",
        "Go.",
    ]


def test_a_flush_closes_what_is_there_even_inside_a_word():
    segmenter = Segmenter(POLICY)
    segmenter.append("Let me thi")
    assert segmenter.flush() == [Segment(10, "Let me thi")]
    assert segmenter.flush() == []
    assert segmenter.append("nk.") == []
    assert segmenter.flush() == [Segment(13, "nk.")]


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "...", "?!", "***", "\u2014", "<|speaker:0|>", "\0", "\u200f"]
)
def test_what_cannot_be_spoken_gives_no_segment(text):
    assert texts_of(text) == []


@pytest.mark.parametrize("text", ["5", "$", "\u20ac", "\U0001f600", "[laugh]", "\u0634", "\u597d"])
def test_what_may_be_spoken_is_passed_on(text):
    assert texts_of(text) == [text]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("aaaa bbbb, cccc dddd eeee ffff", "aaaa bbbb,"),
        ("aaaa bbbb cccc dddd eeee ffff", "aaaa bbbb cccc dddd"),
        ("aaaaabbbbbcccccdddddeeeee", "aaaaabbbbbcccccddddd"),
        ("aaaa bbbb cccc [a b c d e] ff", "aaaa bbbb cccc"),
        ("aaaa bbbb cccc <|abcdef|> ff", "aaaa bbbb cccc"),
        ("aaaaabbbbbcccccdddde\u0301eeeee", "aaaaabbbbbcccccdddd"),
        ("\u597d" * 25, "\u597d" * 20),
        ("aaaa bbbb cccc ddddd eeee", "aaaa bbbb cccc ddddd"),
    ],
)
def test_a_long_segment_is_cut_at_a_clause_a_word_or_at_last_inside_a_word(text, first):
    policy = SegmentPolicy(max_chars=20, min_chars=4, first_clause_chars=100)
    assert texts_of(text, policy)[0] == first


def test_long_silence_does_not_hold_back_what_follows():
    first, second = texts_of("." * 500 + " Hello there. " + " " * 500 + "Bye.")
    assert first.endswith(". Hello there.") and second == "Bye."


def test_controls_and_lone_surrogates_are_cleaned_and_marks_pass():
    assert texts_of("a\0b\x07 \ud800c \u202eabc\u202c") == ["a b  \ufffdc \u202eabc\u202c"]


def test_a_surrogate_pair_in_two_appends_is_one_character():
    assert segments_of(["ok \ud83d", "\ude00"]) == [Segment(5, "ok \U0001f600")]


def test_open_text_stops_at_a_word_border():
    segmenter = Segmenter(POLICY)
    seen = []
    for piece in ["Hel", "lo wor", "ld ", "[lau", "gh] a", " 3.", "14 \u597d\u597d"]:
        assert segmenter.append(piece) == []
        seen.append(segmenter.open_text)
    assert seen == [
        "",
        "Hello",
        "Hello world",
        "Hello world",
        "Hello world [laugh]",
        "Hello world [laugh] a",
        "Hello world [laugh] a 3.14 \u597d\u597d",
    ]


def test_a_turn_of_the_longest_kind_is_cut_in_linear_time():
    text = "Some words, and 3.5 more of them [laugh] for Mr. Long. " * 1_000
    started_s = time.perf_counter()
    num_segments = len(segments_of([text], SegmentPolicy(200)))
    for bad in [
        "[" * 20_000,
        "." * 20_000,
        " " * 20_000,
        "<|" * 10_000,
        "a" * 20_000,
        "\n " * 9_000,
    ]:
        segments_of([bad], SegmentPolicy(200))
    assert num_segments >= 1_000
    assert time.perf_counter() - started_s < 3.0


@pytest.mark.parametrize("text", ["\u200d", "\u0301", "e" + "\u0301" * 9_999, "a\u200d", "\ufe0f"])
def test_a_run_of_marks_is_not_cut_character_by_character(text):
    class Counting(Segmenter):
        num_cuts = 0

        def _cut(self, end):
            self.num_cuts += 1
            return super()._cut(end)

    segmenter = Counting(SegmentPolicy(100))
    segmenter.append((text * 10_000)[:10_000])
    segmenter.flush()
    assert segmenter.num_cuts <= 10_000 / 100 + 2


def test_digits_count_as_the_words_they_are_read_as() -> None:
    policy = SegmentPolicy(max_chars=60)
    text = " ".join("12345" for _ in range(12))
    segmenter = Segmenter(policy)
    segments = segmenter.append(text) + segmenter.flush()
    assert "".join(segment.text for segment in segments).replace(" ", "") == text.replace(" ", "")
    assert all(len(segment.text.replace(" ", "")) <= 10 for segment in segments)


SPEAKERS = SegmentPolicy(max_chars=40, min_chars=1, has_speakers=True)


def spoken(segmenter: Segmenter, *pieces: str) -> list[str]:
    segments = [segment for piece in pieces for segment in segmenter.append(piece)]
    return [segment.text for segment in segments + segmenter.flush()]


@pytest.mark.parametrize("num_pieces", [1, 3, 200])
def test_each_segment_begins_with_the_tag_of_its_speaker(num_pieces):
    text = "Hi. <|speaker:1|>Hello you. And you?<|speaker:0|>Me too, me too, me too, me too, me."
    size = -(-len(text) // num_pieces)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert spoken(Segmenter(SPEAKERS), *pieces) == [
        "Hi.",
        "<|speaker:1|>Hello you.",
        "<|speaker:1|>And you?",
        "<|speaker:0|>Me too, me too,",
        "<|speaker:0|>me too, me too, me.",
    ]


def test_a_tag_alone_is_not_spoken_and_not_forgotten():
    segmenter = Segmenter(SPEAKERS)
    assert segmenter.append("<|speaker:1|> ") + segmenter.flush() == []
    segmenter.append("Hello you and ")
    assert segmenter.open_text == "<|speaker:1|>Hello you and"
    assert [segment.text for segment in segmenter.flush()] == ["<|speaker:1|>Hello you and"]


def test_without_speakers_tags_are_text():
    policy = SegmentPolicy(max_chars=40, min_chars=1)
    assert spoken(Segmenter(policy), "<|speaker:1|>Hi. And you?") == [
        "<|speaker:1|>Hi.",
        "And you?",
    ]
