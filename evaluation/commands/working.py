"""Imports the work of a command only when the command runs, not when its options are read."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def work(name: str, *options: Any) -> None:
    """Do the work of a command: import its module from `kvpolicy.evaluation.commands.work`.

    An ``import`` statement would say that a command and its work import each other.

    Args:
        name: The command's name.
        options: The object of its options, if it has any.
    """
    module = import_module(f"kvpolicy.evaluation.commands.work.{name}")
    getattr(module, f"run_{name}")(*options)
