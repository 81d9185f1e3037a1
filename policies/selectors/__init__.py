"""Selectors: decide which keys and values a layer keeps for decoding."""
