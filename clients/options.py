"""What a session is told of its audio and of its sampling, refused in words as all options are."""

from typing import TYPE_CHECKING, Any

from clients.checks import valid_message
from realtime import wire


class AudioFormat(wire.AudioFormat):
    """The wire's. Raises SessionError `invalid_option` for a field that cannot be."""

    if not TYPE_CHECKING:  # a type checker knows the fields from the wire's

        def __init__(self, **fields: Any) -> None:
            with valid_message():
                super().__init__(**fields)


class Sampling(wire.Sampling):
    """The wire's. Raises SessionError `invalid_option` for a field that cannot be."""

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            with valid_message():
                super().__init__(**fields)
