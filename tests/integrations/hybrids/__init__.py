"""Decoders that mix attention with recurrences and convolutions."""
