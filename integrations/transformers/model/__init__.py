"""Take a model apart: find its layers, attach a cache to it, and observe its queries."""
