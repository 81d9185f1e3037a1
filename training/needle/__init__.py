"""Train the needle model, which answers lookups of one hop and of two."""
