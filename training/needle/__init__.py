"""The needle model: lookups of one hop and of two."""
