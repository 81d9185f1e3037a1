"""What a cache holds: layers, storage, the tokens seen, and how they are reported and saved."""
