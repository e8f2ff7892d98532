"""The model that ships inside the package; see MODEL_CARD.md."""

from pathlib import Path


def embedded_path() -> Path:
    """The folder of the embedded model: a checkpoint like any other, plus voices/."""
    return Path(__file__).resolve().parent
