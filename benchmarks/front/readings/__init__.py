"""A study of what one or two readings of a document tell about what later questions need."""
