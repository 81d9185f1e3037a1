"""Questions about documents with known answers: made of real text, or from files."""
