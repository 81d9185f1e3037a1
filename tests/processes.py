"""Python in a process of its own."""

import subprocess
import sys
from typing import Any


def python(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the interpreter, which must succeed unless ``check`` is False."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )
    assert not check or done.returncode == 0, done.stderr
    return done
