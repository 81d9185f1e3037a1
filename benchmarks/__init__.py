"""Benchmarks: scripts that measure, and the results that they have written.

Importing the package makes kvpolicy importable where it is not installed, as on a borrowed machine
that holds a checkout and nothing else: its folders then count as those of the package.
"""

from importlib.util import find_spec
from pathlib import Path

import kvpolicy

if find_spec("kvpolicy.policies") is None:
    kvpolicy.__path__.append(str(Path(__file__).resolve().parents[1]))
