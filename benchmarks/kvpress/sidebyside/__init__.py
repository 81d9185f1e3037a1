"""Compare kvpolicy and kvpress: code shared by their two workers, and the comparison.

Each worker runs in its own environment. `reading`, `timing`, `behaviours` and `serving` are
common to both and import torch and Transformers only; the rest is for the project's environment.
"""
