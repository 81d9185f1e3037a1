"""Puts the plugin where it is found, as running the script does."""

import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
SCRIPT = TOOLS / "generate_twice" / "run.py"
sys.path.append(str(TOOLS))
