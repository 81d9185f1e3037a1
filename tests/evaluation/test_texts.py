"""Texts: those that come with Python, whole and in the seed's order, and files that are none."""

import sys
import types
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation import texts
from kvpolicy.evaluation.texts import documentation, read_text, sources, words_of
from tests.processes import python


@given(st.text("ab \n\t.", max_size=30))
def test_words_are_the_text(text: str) -> None:
    words = words_of(text)
    assert "".join(words) == text.lstrip()
    assert all(len(word.split()) == 1 and not word[0].isspace() for word in words)


def test_the_documentation_has_every_topic_in_each_round() -> None:
    count = sum(len(text.split()) for text in topics.values())
    words = list(islice(documentation(Random(1)), 2 * count))
    first, second = "".join(words[:count]), "".join(words[count:])
    assert first == second
    assert all(text.strip() in first for text in topics.values())
    assert len(first) == sum(len(text.strip()) + 2 for text in topics.values())


def test_the_seed_decides_the_order() -> None:
    one, same, other = (list(islice(documentation(Random(seed)), 500)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_another_process_reads_the_same() -> None:
    """Sets and hashes have no part in it."""
    script = (
        "from kvpolicy.evaluation.texts import *; from random import Random; import hashlib\n"
        "from itertools import islice\n"
        "read = [*islice(documentation(Random('x 1')), 900), *map(str, sources())]\n"
        "print(hashlib.sha256(''.join(read).encode()).hexdigest())"
    )
    found = [python("-c", script, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert found[0] == found[1]


def test_sources_are_modules_of_the_standard_library() -> None:
    names = [file.stem for file in sources()]
    assert names == sorted(names)
    assert {"argparse", "heapq", "zipfile"} - set(names) <= {"zipfile"}  # a package from 3.12 on
    assert all(name in sys.stdlib_module_names and name[0] != "_" for name in names)
    assert all("def " in file.read_text(encoding="utf-8") for file in sources()[:20])


def test_a_python_without_texts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (texts._topics, texts.sources):
        monkeypatch.setattr(texts, cached.__name__, cached.__wrapped__)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.ModuleType("pydoc_data.topics"))
    with pytest.raises(ValueError, match=r"must come with Python as pydoc_data\.topics"):
        next(documentation(Random(0)))
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"must be in {tmp_path}, got none"):
        texts.sources()


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
