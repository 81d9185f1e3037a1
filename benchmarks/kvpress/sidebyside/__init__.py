"""Compare kvpolicy and kvpress: code that their two workers share, and code that compares them.

Each worker runs in its own environment. `reading`, `timing`, `behaviours` and `serving` are
common to both and import torch and Transformers only; the rest is for the project's environment.
"""
