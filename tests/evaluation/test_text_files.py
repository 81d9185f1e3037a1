"""Files of text: what is said of those that are none."""

from pathlib import Path

import pytest

from kvpolicy.evaluation.texts import read_text


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"\xff\xfe", "UTF-8"), (b"a\0b", "NUL bytes")],
)
def test_file_that_is_no_text(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_text(file, "prompt file")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_text(tmp_path / "none", "prompt file")
    with pytest.raises(ValueError, match="must be a file"):
        read_text(tmp_path, "prompt file")
