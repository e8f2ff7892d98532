"""What one session may ask for, and how its text is cut. Numbers only."""

from dataclasses import dataclass

from realtime.wire import MAX_PROMPT_CHARS, MAX_TEXT_CHARS, MAX_TURN_CHARS


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_text_chars: int = MAX_TEXT_CHARS  # of one text.append
    max_turn_chars: int = MAX_TURN_CHARS
    max_text_chars_per_s: int = 1_000  # on average, some 60 times what is spoken; 0: any number
    text_burst_chars: int = MAX_PROMPT_CHARS + MAX_TURN_CHARS  # that may come at once
    auto_flush_ms: int = 500  # a sentence that no text follows for so long is spoken; 0: it waits
    max_queued_turns: int = 16  # behind the one that is spoken
    max_lead_ms: int = 2_000  # unless the client asks for another
    max_lead_cap_ms: int = 60_000  # more is lowered to this
    drain_deadline_ms: int = 30_000  # announced by `Session.shut_down`; the server keeps it
    cancel_grace_ms: int = 1_000  # a played turn can be cancelled this long after its estimated end
    min_segment_chars: int = 16  # shorter sentences are spoken with the next one
    first_clause_chars: int = 40  # the first segment may end at a clause of this length
