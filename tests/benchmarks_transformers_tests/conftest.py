"""Puts the plugin where it is found, as running the script does."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "transformers_tests"
sys.path.append(str(SCRIPTS))
