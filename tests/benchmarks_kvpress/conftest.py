"""Puts the scripts where they find each other, as running one of them does."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "kvpress"
sys.path.append(str(SCRIPTS))
