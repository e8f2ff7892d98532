"""Random schedules of client messages, engine events and the end: what always holds.

The harness checks every step (no stale command, segments in order, no audio after a cancel, no
message after the close); here the whole is checked at the end.
"""

import random

import pytest

from realtime.session.script import is_speakable
from tests.realtime.session.harness import Harness, types

WORDS = [
    *["Hello there. ", "Yes. ", "Dr. No ", "it costs $3.14, ", "well\u2026 ", "[laugh] ", "a"],
    *["\n\n", "<|speaker:0|>", "\u4f60\u597d\u3002", " ", "", "!?", "\ud83d", "\ude00", "\0"],
    *["Pneumonoultramicroscopicsilicovolcanoconiosis" * 3, "(so he said) ", '"Go." ', ", and "],
]


class Script:
    """A client that does whatever it is allowed to, and some things it is not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = Harness(max_queued_turns=self.rng.randint(0, 4))
        self.sent: dict[int, str] = {}
        self.cancelled: dict[int, str] = {}
        self.next_turn_id = 0

    def run(self) -> None:
        steps = [self.append, self.append, self.append, self.commit, self.commit, self.flush]
        steps += [self.cancel, self.engine, self.engine, self.engine, self.wait, self.other]
        self.harness.receive("session.start")
        for _ in range(self.rng.randint(5, 80)):
            self.rng.choice(steps)()

    def pick(self) -> int:
        """Mostly the newest turn, sometimes an older one or a new one."""
        if not self.sent or self.rng.random() < 0.15:
            self.next_turn_id += self.rng.randint(1, 3)
            return self.next_turn_id
        recent = sorted(self.sent)[-3:]
        return self.rng.choice([recent[-1], *recent])

    def append(self) -> None:
        turn_id = self.pick()
        text = "".join(self.rng.choices(WORDS, k=self.rng.randint(0, 4)))
        if not self.harness.receive("text.append", turn_id=turn_id, text=text):
            self.sent[turn_id] = self.sent.get(turn_id, "") + text

    def commit(self) -> None:
        turn_id = self.pick()
        if not self.harness.receive("turn.commit", turn_id=turn_id):
            self.sent.setdefault(turn_id, "")

    def flush(self) -> None:
        assert self.harness.receive("text.flush", turn_id=self.pick()) == []

    def cancel(self) -> None:
        turn_id = self.pick()
        played_ms = self.rng.choice([None, 0.0, self.rng.uniform(0, 3_000), 1e12])
        messages = self.harness.receive("turn.cancel", turn_id=turn_id, played_ms=played_ms)
        for message in messages:
            if message.type == "turn.cancelled":
                self.cancelled[turn_id] = message.spoken_text + message.remaining_text

    def engine(self) -> None:
        """Produce and deliver in any number: stale events stay in flight over a cancel."""
        for _ in range(self.rng.randint(0, 4)):
            self.harness.engine.step()
        for _ in range(self.rng.randint(0, min(4, len(self.harness.engine.in_flight)))):
            self.harness.deliver()

    def wait(self) -> None:
        self.harness.now_ns += self.rng.randint(0, 800_000_000)
        due_ns = self.harness.session.auto_flush_ns
        if due_ns is not None and due_ns <= self.harness.now_ns:
            self.harness.apply(self.harness.session.auto_flush(self.harness.now_ns))

    def other(self) -> None:
        match self.rng.randint(0, 3):
            case 0:
                self.harness.receive("session.update", voice=self.rng.choice(["anna", "bob"]))
            case 1:
                assert types(self.harness.receive_frame("{")) == ["error"]
            case 2:
                assert types(self.harness.receive("session.start")) == ["error"]
            case 3:
                self.harness.apply(self.harness.session.receive_binary(1))


def whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def letters(text: str) -> str:
    return "".join(char for char in whole(text) if char.isalnum() or char in "$.")


# The last four: text that is told ends at a half of a surrogate pair.
@pytest.mark.parametrize("seed", [*range(400), 1211, 106901, 108725, 112727])
def test_every_turn_ends_once_and_no_text_is_lost(seed):
    script = Script(seed)
    script.run()
    harness, client = script.harness, script.harness.client
    if seed % 4 == 0:
        harness.apply(harness.session.disconnected())
        assert harness.engine.is_closed and not harness.session.num_turns
    elif seed % 4 == 1:
        harness.apply(harness.session.shut_down("shutting_down"))
        for turn_id in script.sent:
            harness.receive("turn.commit", turn_id=turn_id)
        harness.run()
        assert client.close is not None and client.close.code == 1001
    else:
        messages = harness.receive("session.close")
        script.cancelled |= {
            m.turn_id: m.spoken_text + m.remaining_text
            for m in messages
            if m.type == "turn.cancelled"
        }
        harness.run()
        assert client.close is not None and client.close.code == 1000
    check_ends(script, was_disconnected=seed % 4 == 0)
    check_texts(script)


def check_ends(script: Script, was_disconnected: bool) -> None:
    ends = script.harness.client.ends
    for turn_id in script.sent:
        ended = [end for end in ends.get(turn_id, []) if end != "error"]
        possible = [["turn.done"], ["turn.cancelled"], ["turn.done", "turn.cancelled"]]
        assert ended in possible or (was_disconnected and ended == []), (turn_id, ended)
    # What was refused was never opened: its errors are all that came of it.
    for turn_id in ends.keys() - script.sent.keys():
        assert set(ends[turn_id]) == {"error"}, turn_id


def check_texts(script: Script) -> None:
    harness = script.harness
    for turn_id, text in script.cancelled.items():
        assert text == whole(text) and len(text) >= len(whole(script.sent[turn_id]))
        assert letters(text).replace("\ufffd", "") == letters(script.sent[turn_id]).replace(
            "\ufffd", ""
        )
    for turn_id, ended in harness.client.ends.items():
        if ended[0] != "turn.done":
            continue
        spoken = letters("".join(harness.engine.texts.get(turn_id, [])))
        sent = letters(script.sent[turn_id].replace("<|speaker:0|>", ""))
        spoken = spoken.replace("speaker0", "")
        assert spoken.replace(".", "") == sent.replace(".", ""), turn_id
        if is_speakable(script.sent[turn_id]):
            assert harness.client.told[turn_id] == whole(script.sent[turn_id])
            assert harness.client.packets[turn_id][-1].is_last
