"""Tasks of the harness for the tests, as a user would write them."""

from pathlib import Path

TASKS = Path(__file__).parent
