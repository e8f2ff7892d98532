"""English text to the phonemes that the embedded voice speaks."""

from model.text.front_end import EnglishFrontEnd, SpokenText

__all__ = ["EnglishFrontEnd", "SpokenText"]
