"""What callers pass in, refused in words before anything is sent: what was got, what is expected."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real

from pydantic import ValidationError

from realtime.errors import SessionError, fault, shorten


def expect(is_valid: bool, param: str, got: object, expected: str) -> None:
    """Raises SessionError `invalid_option`, unless `is_valid`."""
    if not is_valid:
        why = f"{param}: got {shorten(got)}, expected {expected}"
        raise SessionError("invalid_option", why, param=param)


def is_from(least: float, value: object) -> bool:
    """Whether it is a number, which one of numpy's is as well, and not below `least`."""
    return isinstance(value, Real) and float(value) >= least


def check_ssl_context(ssl_context: ssl.SSLContext | None) -> None:
    is_valid = ssl_context is None or isinstance(ssl_context, ssl.SSLContext)
    expect(is_valid, "ssl_context", ssl_context, "an ssl.SSLContext, or None")


@contextmanager
def valid_message() -> Iterator[None]:
    """Raises SessionError `invalid_option` for a value that no message of the wire can carry."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        why = f"{param}: {fault(first)}" if param else first["msg"].removeprefix("Value error, ")
        raise SessionError("invalid_option", why, param=param or None) from None
