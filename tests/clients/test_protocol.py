"""The protocol core alone: whatever a server sends, in whatever order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.protocol import MAX_DONE_TURNS, ClientProtocol, ForTurn
from realtime import wire
from realtime.errors import PlosiveError
from tests.clients.scripted_server import done, packet

TURN_IDS = st.integers(1, 4)
FRAMES = st.one_of(
    st.builds(lambda i: wire.encode(wire.TurnStarted(turn_id=i)), TURN_IDS),
    st.builds(lambda i, s: wire.pack_audio(packet(i, s, b"\0\0")), TURN_IDS, st.integers(0, 2)),
    st.builds(lambda i: wire.encode(wire.TurnText(turn_id=i, text="a", audio_ms=1)), TURN_IDS),
    st.builds(lambda i, n: wire.encode(done(i, n)), TURN_IDS, st.integers(0, 2)),
    st.builds(
        lambda i: wire.encode(
            wire.TurnCancelled(turn_id=i, spoken_text="a", remaining_text="b", played_ms=1)
        ),
        TURN_IDS,
    ),
    st.builds(
        lambda i: wire.encode(wire.Warn(code="unknown_turn", message="", turn_id=i)), TURN_IDS
    ),
    st.builds(
        lambda i, fatal: wire.encode(wire.Error(code="x", message="", turn_id=i, fatal=fatal)),
        st.none() | TURN_IDS,
        st.just(False) | st.booleans(),
    ),
    st.text(max_size=20),
    st.binary(max_size=20),
)
CALLS = st.tuples(st.sampled_from(["open", "append", "commit", "cancel"]), TURN_IDS)


def start() -> ClientProtocol:
    return ClientProtocol(wire.SessionStart())


def call(protocol: ClientProtocol, name: str, turn_id: int, opened: set[int]) -> None:
    try:
        if name == "open":
            opened.add(protocol.open_turn())
        elif name == "append":
            protocol.append(turn_id, "text")
        elif name == "commit":
            protocol.commit(turn_id)
        else:
            protocol.cancel(turn_id, 1.0)
    except PlosiveError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.lists(FRAMES | CALLS, max_size=40))
def test_every_turn_ends_once_whatever_comes(steps) -> None:
    protocol = start()
    opened: set[int] = set()
    ends: dict[int, list[object]] = {}
    for step in [*steps, None]:
        if isinstance(step, tuple):
            call(protocol, *step, opened)
            continue
        routed = protocol.connection_lost(1006) if step is None else protocol.receive(step)
        for each in routed:
            if not isinstance(each, ForTurn):
                continue
            assert each.turn_id in opened
            over = ends.setdefault(each.turn_id, [])
            if isinstance(each.event, wire.AudioPacket | wire.TurnText):
                assert not over, "audio or text after the end"
            if isinstance(each.event, wire.TurnDone | wire.TurnCancelled | PlosiveError):
                over.append(each.event)
    assert protocol.has_failed
    assert opened == set(ends)
    for over in ends.values():
        is_cancelled_while_it_plays = len(over) == 2 and isinstance(over[0], wire.TurnDone)
        assert len(over) == 1 + is_cancelled_while_it_plays
        assert not is_cancelled_while_it_plays or not isinstance(over[1], wire.TurnDone)


def test_done_turns_are_kept_for_a_late_cancel_but_not_for_ever() -> None:
    protocol = start()
    for _ in range(MAX_DONE_TURNS + 5):
        turn_id = protocol.open_turn()
        protocol.append(turn_id, "text")
        protocol.commit(turn_id)
        protocol.receive(wire.encode(done(turn_id, 0)))
    assert protocol.cancel(1, None) == []
    assert protocol.cancel(turn_id, None) != []


def test_nothing_is_told_of_a_cancelled_turn_but_its_account() -> None:
    """Words and audio that crossed the cancel would end up in the next turn's transcript."""
    protocol = start()
    turn_id = protocol.open_turn()
    protocol.append(turn_id, "One two.")
    text = wire.encode(wire.TurnText(turn_id=turn_id, text="One", audio_ms=20.0))
    (told,) = protocol.receive(text)
    assert isinstance(told, ForTurn)
    assert protocol.cancel(turn_id, 20.0)
    assert protocol.receive(text) == []
    assert protocol.receive(wire.pack_audio(packet(turn_id, 0, b"\0\0"))) == []
    cancelled = wire.TurnCancelled(
        turn_id=turn_id, spoken_text="One", remaining_text=" two.", played_ms=20.0
    )
    assert protocol.receive(wire.encode(cancelled)) == [ForTurn(turn_id, cancelled)]
    assert protocol.receive(text) == []


@pytest.mark.parametrize(
    ("num_told", "played_ms", "expected"),
    [
        (2, 150.0, ("One. ", "Two.", 150.0)),
        (
            2,
            None,
            ("One. Two.", "", 200.0),
        ),  # all that was told of, where nobody says what was heard
        (0, None, ("", "One. Two.", 0.0)),
    ],
)
def test_the_account_keeps_the_text_whole(
    num_told: int, played_ms: float | None, expected: tuple[str, str, float]
) -> None:
    protocol = start()
    turn_id = protocol.open_turn()
    protocol.append(turn_id, "One. ")
    protocol.append(turn_id, "Two.")
    for text, audio_ms in (("One. ", 100.0), ("One. Two.", 200.0))[:num_told]:
        protocol.receive(wire.encode(wire.TurnText(turn_id=turn_id, text=text, audio_ms=audio_ms)))
    protocol.cancel(turn_id, played_ms)
    account = protocol.account(turn_id)
    assert (account.spoken_text, account.remaining_text, account.played_ms) == expected
