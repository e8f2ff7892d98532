"""Plosive inside agent frameworks. Each file needs its framework; nothing imports it by itself."""
