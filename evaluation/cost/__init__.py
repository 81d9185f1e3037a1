"""Count operations and bytes of a policy before anything runs."""
