"""The parts of a conversation: its text, what is read of it, one turn, its file."""
