"""What tests of pages share: where they are, their fenced blocks, and what a block prints."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def text_of(page: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def printed(code: str, names: dict[str, object] | None = None) -> str:
    """What a block prints; it finds and leaves names in ``names``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {} if names is None else names)
    return out.getvalue()
