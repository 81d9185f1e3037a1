"""Ask for the next line of a source file of the standard library, as LCC does.

Source: Guo et al., "LongCoder", arXiv:2306.14893, whose data LongBench uses. The files are those of
the Python that runs, and every line to complete names something that only earlier lines name.
"""

import ast
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

import attrs

from kvpolicy.evaluation.tasks.question import Question, line_similarity
from kvpolicy.evaluation.tasks.task import SizedTask
from kvpolicy.evaluation.texts import sources

# The last lines before the one to complete: what a policy that has to choose early doesn't see.
_LAST = 10
# A name that is needed occurs in as many lines before those.
_BEFORE = 60
_NAME = re.compile(r"[A-Za-z_]\w{4,}")


@attrs.frozen
class Completion(SizedTask):
    """Sources whose next line is to be completed, scored by the similarity of the first line.

    The unit of a document is a line. The last ten lines before the one to complete are the
    question. A name in that line is neither in these ten nor a word of Python, but in one of the 60
    before them.
    """

    name: ClassVar[str] = "completion"
    smallest: ClassVar[int] = _LAST

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the unit is a line."""
        file = rng.choice(sources())
        while not _numbers(file):
            file = rng.choice(sources())
        lines, number = _lines(file), rng.choice(_numbers(file))
        start = max(number - _LAST - size, 0)
        return Question(
            document="\n".join(lines[start : number - _LAST]),
            question="\n" + "\n".join(lines[number - _LAST : number]),
            answers=(f"\n{lines[number]}",),
            kind="completion",
            score=line_similarity,
            new_tokens=64,
            plain=True,
        )


@cache
def _lines(file: Path) -> list[str]:
    return [line.rstrip() for line in file.read_text(encoding="utf-8").split("\n")]


@cache
def _numbers(file: Path) -> list[int]:
    """Return the lines of a file that hold a whole statement and need an earlier line."""
    lines = _lines(file)
    statements = {
        node.lineno - 1
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, (ast.Assign, ast.Return, ast.Expr)) and node.lineno == node.end_lineno
    }
    found = []
    for number in sorted(each for each in statements if each >= _LAST + _BEFORE):
        line = lines[number].strip()
        last = _names(lines[number - _LAST : number])
        earlier = _names(lines[number - _LAST - _BEFORE : number - _LAST])
        if len(line) >= 20 and line[0] not in "\"'" and (_names([line]) & earlier) - last:
            found.append(number)
    return found


def _names(lines: list[str]) -> set[str]:
    return {name for line in lines for name in _NAME.findall(line)}
