"""kvpolicy and kvpress side by side: what their two workers share, and what compares them.

The workers run in environments of their own. `reading`, `timing`, `behaviours` and `serving` are
common to both and import torch and Transformers only; the rest is for the project's environment.
"""
