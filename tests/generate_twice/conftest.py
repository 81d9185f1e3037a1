"""Puts the plugin where it is found, as running the script does."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))
