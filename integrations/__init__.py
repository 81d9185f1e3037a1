"""Connect policies to other libraries."""
