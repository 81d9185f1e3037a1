"""Choose the layer after which tokens are dropped, by final hidden states."""
