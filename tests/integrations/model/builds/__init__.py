"""Every decoder of the installed Transformers, tiny, held against its own dense attention."""
