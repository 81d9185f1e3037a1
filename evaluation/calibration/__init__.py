"""After which layer to drop tokens, by hidden states."""
