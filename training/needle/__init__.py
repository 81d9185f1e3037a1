"""Train the needle model, which answers lookups of one or two hops."""
