"""The parts of a conversation: its template, what was read of it, a turn, its file."""
