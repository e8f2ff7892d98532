"""Errors that `model/` raises at its boundaries.

    ModelError
    ├── ConfigError       config.json does not describe a model that this code runs
    ├── CheckpointError   weight files are missing, damaged, or do not fit the config
    ├── PromptError       text, voice or tokenizer cannot be turned into a prompt
    ├── ClipError         a recording cannot serve as reference audio
    └── SamplingError     a sampling parameter is out of range

Every message says what was got, what was expected and what to do. Broken invariants inside
`model/` and `ops/` are asserts, not errors of this tree.
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything `model/` raises on bad input."""


class ConfigError(ModelError):
    """A config field is missing, unknown, or holds a value this code cannot run."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, damaged, or holds tensors that do not fit the config."""


class PromptError(ModelError):
    """A text, a voice or a tokenizer does not fit the model's prompt format."""


class ClipError(ModelError):
    """A clip cannot serve as reference audio; the message says why and what to do."""


class SamplingError(ModelError):
    """A sampling parameter is not a number or lies outside its range."""
