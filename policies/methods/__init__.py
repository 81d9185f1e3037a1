"""Named methods from the literature, each composed of a scorer, a selector and a propagation."""
