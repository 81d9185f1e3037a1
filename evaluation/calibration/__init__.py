"""Choose the layer after which tokens are dropped, by the change of final hidden states."""
