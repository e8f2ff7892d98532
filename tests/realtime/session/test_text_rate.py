"""Accounts of text: of one owner each, over all that spend from it."""

import pytest

from realtime.errors import CapacityError
from realtime.pingpong.messages import OpenSlot
from realtime.session.text_rate import TextRates, burst_chars, charge
from tests.realtime.session.harness import Harness, commands

S = 1_000_000_000


def refusal(accounts, num_chars: int, now_ns: int) -> CapacityError:
    with pytest.raises(CapacityError) as refused:
        charge(accounts, num_chars, now_ns)
    assert refused.value.code == "text_rate_exceeded"
    return refused.value


def test_a_burst_then_the_rate():
    rates = TextRates("a client", 10, burst_chars=100)
    account = rates.account("anna")
    charge([account], 100, now_ns=0)
    error = refusal([account], 20, now_ns=0)
    assert error.retry_after_s == 2.0
    assert "a client may send 10 characters" in error.message and "in 2 s" in error.message
    charge([account], 20, now_ns=2 * S)
    assert refusal([account], 1, now_ns=2 * S).retry_after_s == 0.1
    charge([account], 100, now_ns=100 * S)  # a silence does not add to the burst
    refusal([account], 1, now_ns=100 * S)


def test_owners_have_accounts_of_their_own():
    rates = TextRates("a client", 10, burst_chars=100)
    charge([rates.account("anna")], 100, now_ns=0)
    refusal([rates.account("anna")], 1, now_ns=0)
    charge([rates.account("bob")], 100, now_ns=0)


def test_all_accounts_are_charged_or_none():
    small, large = TextRates("a session", 10, 50), TextRates("a client", 10, 100)
    both = [small.account(""), large.account("anna")]
    for order in (both, both[::-1]):
        assert "a session" in refusal(order, 60, now_ns=0).message
    charge([large.account("anna")], 100, now_ns=0)  # nothing was taken from it
    error = refusal(both, 50, now_ns=0)
    assert "a client" in error.message and error.retry_after_s == 5.0
    charge([small.account("")], 50, now_ns=0)


def test_a_rate_of_zero_permits_any_text():
    rates = TextRates("a client", 0, burst_chars=burst_chars(0))
    for _ in range(100):
        charge([rates.account("anna")], 1_000_000, now_ns=0)


def test_what_may_come_at_once_is_a_minutes_worth_and_a_whole_turn_with_its_prompt():
    assert [burst_chars(rate) for rate in (1, 1_000, 4_000)] == [64_000, 64_000, 240_000]


def test_accounts_are_kept_until_they_are_settled():
    """However many clients there were, and whether they are connected or not."""
    rates = TextRates("a client", 10, burst_chars=100)
    charge([rates.account("anna")], 100, now_ns=0)
    for i in range(5_000):
        charge([rates.account(str(i))], 1, now_ns=i * S // 1_000)
    assert len(rates) < 3_000  # each is settled after 100 ms
    refusal([rates.account("anna")], 60, now_ns=5 * S)
    charge([rates.account("anna")], 50, now_ns=5 * S)


def test_sessions_of_one_client_share_its_account():
    rates = TextRates("a client", 10, burst_chars=100)
    one, two, other = (
        Harness(client_text=rates.account(owner)) for owner in ("anna", "anna", "bob")
    )
    for harness in (one, two, other):
        harness.start()
    assert one.receive("text.append", turn_id=1, text="a " * 40) == []
    (error,) = two.receive("text.append", turn_id=1, text="a " * 20)
    assert (error.code, error.turn_id, error.keeps_turn) == ("text_rate_exceeded", 1, True)
    assert error.retry_after_ms == 2_000
    assert other.receive("text.append", turn_id=1, text="a " * 40) == []
    two.now_ns += 2 * S
    assert two.receive("text.append", turn_id=1, text="a " * 20) == []
    assert two.receive("turn.commit", turn_id=1) == []
    two.run()
    assert two.client.ends == {1: ["turn.done"]}


def test_prompts_are_charged_when_they_are_taken():
    rates = TextRates("a client", 10, burst_chars=100)
    harness = Harness(client_text=rates.account("anna"))
    (error,) = harness.receive("session.start", voice="nobody", prompt="p" * 100)
    assert error.code == "voice_not_found", "and nothing was charged"
    harness.start(prompt="p" * 60)
    (error,) = harness.receive("session.update", prompt="q" * 60)
    assert (error.code, error.param, error.turn_id) == ("text_rate_exceeded", "prompt", None)
    assert error.retry_after_ms == 2_000 and not error.fatal
    (error,) = harness.receive("text.append", turn_id=1, text="a " * 30)
    assert (error.code, error.retry_after_ms) == ("text_rate_exceeded", 2_000)
    assert [command.prompt for command in commands(harness, OpenSlot)] == ["p" * 60]
    harness.receive("session.update", voice="bob")  # the prompt that stays is paid
    harness.now_ns += 2 * S
    harness.receive("session.update", prompt="q" * 60)
    harness.run()
    assert [command.prompt for command in commands(harness, OpenSlot)][-1] == "q" * 60


def test_a_session_whose_prompt_is_refused_can_be_started_later():
    rates = TextRates("a client", 10, burst_chars=100)
    charge([rates.account("anna")], 90, now_ns=0)
    harness = Harness(client_text=rates.account("anna"))
    (error,) = harness.receive("session.start", prompt="p" * 60)
    assert (error.code, error.param, error.retry_after_ms) == (
        "text_rate_exceeded",
        "prompt",
        5_000,
    )
    assert not harness.session.is_started
    harness.now_ns += 5 * S
    harness.start(prompt="p" * 60)


def test_a_prompt_and_a_whole_turn_may_come_at_once():
    harness = Harness(max_text_chars_per_s=1)
    harness.start(prompt="p" * 4_000)
    for _ in range(3):
        assert harness.receive("text.append", turn_id=1, text="a " * 10_000) == []
    (error,) = harness.receive("text.append", turn_id=2, text="a")
    assert error.code == "text_rate_exceeded"


@pytest.mark.parametrize("chars_per_s", [7, 900, 999_999_937])
def test_what_fits_is_taken_whole_or_in_pieces(chars_per_s):
    """Whatever fractions of a nanosecond a character takes."""
    rates = TextRates("a client", chars_per_s, burst_chars=60_000)
    charge([rates.account("anna")], 60_000, now_ns=1)
    for num_chars in (20_001, 19_998, 1, 20_000):
        charge([rates.account("bob")], num_chars, now_ns=1)


def test_after_the_time_that_is_told_it_is_taken():
    harness = Harness(client_text=TextRates("a client", 7, burst_chars=100).account("anna"))
    harness.start()
    assert harness.receive("text.append", turn_id=1, text="a " * 50) == []
    (error,) = harness.receive("text.append", turn_id=1, text="a " * 4)
    harness.now_ns += error.retry_after_ms * 1_000_000
    assert harness.receive("text.append", turn_id=1, text="a " * 4) == []


def test_text_that_is_refused_for_its_turn_costs_nothing():
    """Of a turn that was interrupted, what its writer still sends."""
    rates = TextRates("a client", 10, burst_chars=100)
    harness = Harness(client_text=rates.account("anna"), max_queued_turns=0)
    harness.start()
    harness.receive("text.append", turn_id=2, text="a " * 5)
    for turn_id, code in ((1, "turn_id_used"), (3, "too_many_turns")):
        (error,) = harness.receive("text.append", turn_id=turn_id, text="a " * 45)
        assert (error.code, error.keeps_turn) == (code, False)
    harness.apply(harness.session.shut_down("shutting_down"))
    (error,) = harness.receive("text.append", turn_id=4, text="a " * 45)
    assert error.code == "session_closing"
    assert harness.receive("text.append", turn_id=2, text="a " * 45) == []
