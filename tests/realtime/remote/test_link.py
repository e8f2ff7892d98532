"""Messages between processes: whole, in order, and never waited for unless asked to."""

import threading

import numpy as np
import pytest

from realtime.pingpong.messages import FramePcm, SegmentEnd, SlotRef
from realtime.remote.link import MAX_BACKLOG, Link, LinkClosed, MessageReader, link_pair, packed


def frame(number: int, num_samples: int = 2_048) -> FramePcm:
    pcm = np.arange(num_samples, dtype=np.float32) + number
    return FramePcm(
        SlotRef(3, 2**40), turn_id=7, segment=1, first_frame=number, num_frames=1, pcm=pcm
    )


def same(got: FramePcm, sent: FramePcm) -> bool:
    fields = ("slot", "turn_id", "segment", "first_frame", "num_frames")
    is_same = all(getattr(got, name) == getattr(sent, name) for name in fields)
    return is_same and np.array_equal(got.pcm, sent.pcm) and got.pcm.flags.aligned


@pytest.mark.parametrize("piece", [1, 3, 1000, 10**6])
def test_messages_survive_any_pieces(piece: int) -> None:
    end = SegmentEnd(SlotRef(1, 2), 3, 4, 5)
    sent = [frame(0), "odd", frame(1, 1), end, frame(2)]
    data = b"".join(part for message in sent for part in packed(message))
    reader, got = MessageReader(), []
    for at in range(0, len(data), piece):
        got += reader.feed(data[at : at + piece])
    assert [type(message) for message in got] == [type(message) for message in sent]
    assert same(got[0], sent[0]) and same(got[2], sent[2]) and same(got[4], sent[4])
    assert (got[1], got[3]) == ("odd", end)


def test_what_the_socket_does_not_take_waits_in_order() -> None:
    ours, theirs = link_pair()
    sender, receiver = Link(ours, "out"), Link(theirs, "in")
    for number in range(1_000):  # 8 MB: more than any socket's buffer, and nobody reads yet
        sender.send(frame(number))
    assert sender.num_waiting > 0
    got: list[FramePcm] = []
    reader = threading.Thread(target=receiver.receive, args=(got.append,))
    reader.start()
    sender.drain(timeout_s=30.0)
    sender.close()
    reader.join(30.0)
    assert [message.first_frame for message in got] == list(range(1_000))
    receiver.close()


def test_a_patient_sender_waits_for_room_and_hears_of_the_end() -> None:
    ours, theirs = link_pair()
    sender, receiver = Link(ours, "out"), Link(theirs, "in")
    outcome: list[BaseException] = []

    def flood() -> None:
        try:
            while True:
                sender.send(frame(0), is_patient=True)
        except LinkClosed as error:
            outcome.append(error)

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join(1.0)
    while thread.is_alive() and sender.num_waiting < MAX_BACKLOG:
        thread.join(0.05)
    assert thread.is_alive() and sender.num_waiting <= MAX_BACKLOG + 2
    receiver.close()
    thread.join(10.0)
    assert outcome and not thread.is_alive()
    sender.close()


def test_the_other_end_closing_ends_both() -> None:
    ours, theirs = link_pair()
    link, other = Link(ours, "out"), Link(theirs, "in")
    other.close()
    link.receive(lambda message: pytest.fail(f"got {message}"))
    with pytest.raises(LinkClosed):
        for _ in range(3):
            link.send("anybody there?")
    link.close()
    link.close()


def test_a_long_message_is_put_together_once() -> None:
    """A clip of 20 MB comes in hundreds of pieces, and commands wait behind it."""
    clip = bytes(2**21)
    data = b"".join(part for message in ("before", clip, "after") for part in packed(message))
    reader, got, pieces = MessageReader(), [], []
    for at in range(0, len(data), 1000):
        got += reader.feed(data[at : at + 1000])
        pieces.append(len(reader._pieces))
    assert got == ["before", clip, "after"]
    assert pieces[1:2001] == list(range(2, 2002)) and pieces[-1] == 0
