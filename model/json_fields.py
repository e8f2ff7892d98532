"""A JSON object whose fields are asked for one by one: a wrong one is named, a strange one refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.errors import ConfigError

_MAX_INTEGER = 2**31 - 1
_MAX_SHOWN = 60  # characters of a value in a complaint


def read_json(path: Path) -> dict[str, Any]:
    """The object in a config.json.

    Raises:
        ConfigError: the file is missing, or holds no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected the config.json of a checkpoint"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got a JSON {type(data).__name__}, expected an object")
    return data


class Fields:
    """Typed access; null counts as missing, and what is missing without a default is an error.

    When all fields have been asked for, you must call `close`.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        """where: the object's own name, empty at the top.

        Raises:
            ConfigError: here as everywhere, naming the field, what was got and what was expected.
        """
        self._where = where
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: got {_shown(data)}, expected an object")
        self._data = data
        self._known: set[str] = set()
        self._ignored: set[str] = set()

    def integer(self, name: str, default: int | None = None, most: int = _MAX_INTEGER) -> int:
        """A positive one."""
        value = self._get(name, default)
        if not _is_integer(value, 1):
            raise self.bad(name, "a positive integer")
        if value > most:
            raise self.bad(name, f"at most {most}")
        return int(value)

    def integers(
        self, name: str, default: list[int] | None = None, least: int = 1
    ) -> tuple[int, ...]:
        value = self._get(name, default)
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or not all(_is_integer(v, least) and v <= _MAX_INTEGER for v in value):
            raise self.bad(name, f"a list of integers from {least} to {_MAX_INTEGER}")
        return tuple(value)

    def id(self, name: str) -> int | None:
        """A token id, or None."""
        value = self._get(name, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.bad(name, "a token id")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive one."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.bad(name, "a positive number")
        if value > sys.float_info.max:
            raise self.bad(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def expect(self, name: str, wanted: object, default: object = None) -> None:
        """Refuse a variant that this code does not have; a field without default may be missing."""
        value = self._get(name, wanted if default is None else default)
        if value != wanted:
            raise self.bad(name, json.dumps(wanted), default)

    def child(self, name: str) -> Fields:
        value = self._get(name, None)
        if not isinstance(value, Mapping):
            raise self.bad(name, "an object")
        return Fields(value, self._full(name))

    def ignore(self, *names: str) -> None:
        """Fields that may be there and change nothing here."""
        self._ignored.update(names)

    def close(self) -> None:
        unknown = sorted(set(self._data) - self._known - self._ignored)
        if unknown:
            raise ConfigError(
                f"unknown field{'s' * (len(unknown) > 1)} {', '.join(map(self._full, unknown))}; "
                f"valid ones are {', '.join(sorted(self._known))}"
            )

    def bad(self, name: str, expected: str, default: object = None) -> ConfigError:
        """A complaint; `default`: what it means that the field is missing."""
        value = self._data.get(name)
        got = "it is missing" if value is None else f"got {_shown(value)}"
        if value is None and default is not None:
            got += f" (which means {json.dumps(default)})"
        return ConfigError(f"{self._full(name)}: {got}, expected {expected}")

    def _get(self, name: str, default: object) -> Any:
        self._known.add(name)
        value = self._data.get(name)
        return default if value is None else value

    def _full(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
