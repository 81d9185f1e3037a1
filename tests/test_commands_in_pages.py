"""Every command line of the README and of the pages runs, as it is written.

The lines are found in the pages: in fenced blocks, and in the text where a name has more behind it.
What is put in the place of what cannot be run here:

- PATH, MODEL, SMALL and the names of models on the Hub by a tiny random Llama, files by made-up
  ones in a working folder of the test, DIR by an empty folder there (`GIVEN`);
- lengths, numbers of prompts, documents and tokens by small ones (`SIZES`, `LEAST`); GPUs by the
  CPU; where the memory of Llama-3.1-8B is asked for, 32 layers by four;
- what a line in the text leaves out because it is about one option (`COMPLETED`).

docs/reproduce.md is run by test_reproduce.py, what torchrun starts by test_processes.py. `make`,
`pip` and the scripts of benchmarks/, which are about hours of work, are not run.
"""

import json
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpolicy import names
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.commands.app import COMMANDS
from kvpolicy.evaluation.default_model import default_model
from tests.needle import MODEL_DIR
from tests.pages import FENCE, ROOT
from tests.test_reproduce import place as place

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINE = re.compile(r"(?:\$ )?((?:kvpolicy|python3?|torchrun|lm_eval) .*)")
NAMES = {command.__name__.replace("_", "-") for command in COMMANDS}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using slow pure-python SequenceMatcher:UserWarning", "ignore::SyntaxWarning"
)

# Run by other tests, or nowhere: by how a line begins.
ELSEWHERE = (
    "torchrun ",
    "python benchmarks/",
    "python docs/examples/",
    "python kvpolicy/docs/examples/",
    "python -m benchmarks.",
    "python3 -m venv ",
)
HARNESS = "python -m kvpolicy.integrations.lm_eval"

GIVEN = {
    "PATH": "model",
    "MODEL": "model",
    "my-model": "model",
    "SMALL": "model",
    "DIR": "made",
    "my_scorer": "last_query",
    "QUERY s60": "What is the name?",
}
HUB = re.compile(r"(?:meta-llama|Qwen)/[\w.-]+")
# Options whose values are sizes.
SIZES = {
    "--lengths": "128",
    "--limit": "1",
    "--top-k": "4",
    "--answer-tokens": "3",
    "--decoding-tokens": "24",
    "--decoding-every": "8",
    "--count": "2",
    "--tokens": "200",
    "--context": "300",
    "--tsp-layers": "1,2",
    "--device": "cpu",
}
# What is measured where a line leaves it open.
LEAST = {
    "compare": ("--context", "200", "--count", "1", "--rounds", "0"),
    "calibrate": ("--context", "200", "--count", "1"),
    "analyze": ("--context", "200", "--count", "1", "--top-k", "4"),
    "generate": ("--answer-tokens", "2"),
    "eval": ("--limit", "1"),
}
# What `kvpolicy eval` is asked for, since the harness's tasks must be downloaded.
ANSWERED = {
    "--model": str(MODEL_DIR),
    "--include": str(ROOT / "tests/evaluation/suite/tasks"),
    "--tasks": "own_words",
    "--lengths": "96",
}
COMPLETED = {"generate": ("--prompt-file", "report.txt")}


def lines_of(page: Path) -> Iterator[str]:
    """The command lines of a page, without its comments."""
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language != "python":
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if found := LINE.fullmatch(line.strip()):
                    yield " ".join(re.sub(r"\s#\s.*", "", found[1]).split())
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        # The name of a command alone is no line.
        if (found := LINE.fullmatch(" ".join(code.split()))) and found[1] not in BARE:
            yield found[1]


BARE = {HARNESS, *(f"kvpolicy {name}" for name in NAMES - {"policies"})}
FOUND = dict.fromkeys(
    line for page in PAGES if page.name != "reproduce.md" for line in lines_of(page)
)
LINES = [line for line in FOUND if not line.startswith(ELSEWHERE)]


def test_lines_are_found() -> None:
    """Those of two blocks, and in the text; a page's kinds of lines are all known."""
    for page, count in (("README.md", 3), ("docs/commands.md", 10)):
        text = (ROOT / page).read_text(encoding="utf-8")
        block = next(block for _, block in FENCE.findall(text) if "kvpolicy check" in block)
        assert len(block.splitlines()) == count
        for line in block.splitlines():
            assert " ".join(re.sub(r"\s#\s.*", "", line).split()) in LINES
    assert "kvpolicy compare -p fastkv --tsp-layers 7,11,15,19" in LINES
    for line in LINES:
        known = line.startswith(HARNESS) or line.split()[1] in NAMES
        assert known, f"nobody runs {line}"


def test_scripts_that_are_not_run_are_there() -> None:
    scripts = [shlex.split(line) for line in FOUND if line.startswith("python ")]
    assert len(scripts) > 4
    for script in scripts:
        if script[1] == "-m":
            assert find_spec(script[2]) is not None, script
        else:
            assert (ROOT / script[1].removeprefix("kvpolicy/")).is_file(), script


@pytest.fixture(scope="module")
def files(place: Path) -> Path:
    """What the lines name, beside a model and the data of tasks."""
    essay = (place / "long.txt").read_text()
    (place / "report.txt").write_text(essay)
    for folder in ("documents", "served"):
        (place / folder).mkdir()
    row = json.dumps({"context": essay[:300], "question": "Who?", "answer": "the"})
    (place / "questions.jsonl").write_text(f"{row}\n{row}\n")
    chat = [{"role": "system", "content": essay[:50]}, {"role": "user", "content": essay}]
    (place / "chat.json").write_text(json.dumps(chat))
    return place


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that docs/own_parts.md writes and registers."""
    page = (ROOT / "docs/own_parts.md").read_text(encoding="utf-8")
    package = types.ModuleType("my_package")
    monkeypatch.setitem(sys.modules, "my_package", package)
    mine = [
        EntryPoint(name, target, names.GROUP)
        for name, target in re.findall(r'^(\w+) = "(my_package:\w+)"$', page, re.MULTILINE)
    ]
    for each in mine:
        wanted = f"class {each.attr}("
        code = next(block for _, block in FENCE.findall(page) if wanted in block)
        exec(code.partition(f"check_{each.name.rpartition('_')[2]}(")[0], package.__dict__)
    monkeypatch.setattr(names, "entry_points", lambda group: [*entry_points(group=group), *mine])


def tiny(line: str) -> tuple[list[str], str]:
    """A line's arguments with what is replaced, and where its output goes."""
    arguments = shlex.split(line)[1:]
    output = ""
    if ">" in arguments:
        arguments, (output,) = (
            arguments[: arguments.index(">")],
            arguments[arguments.index(">") + 1 :],
        )
    command = arguments[0]
    found = [GIVEN.get(each, each) for each in arguments]
    found = [each if not HUB.fullmatch(each) else "model" for each in found]
    for at, each in enumerate(found[:-1]):
        if each in SIZES:
            found[at + 1] = SIZES[each]
    if found[-1] == "--prompt-file":
        found.append("report.txt")
    if command in COMPLETED and not {"--prompt-file", "--chat-file", "--tasks"} & set(found):
        found += COMPLETED[command]
    if command == "eval":  # each its own folder: one goes on under the same settings alone
        asked = {**ANSWERED, "--out": f"results-{LINES.index(line)}"}
        found = [each for each in found if each != "--chat"]
        kept = [it for at, it in enumerate(found) if not {it, found[at - 1]} & {*asked}]
        found = [*kept, *(each for pair in asked.items() for each in pair)]
    least = LEAST.get(command, ())
    for option, value in zip(least[::2], least[1::2], strict=True):
        if option not in found:
            found += [option, value]
    return found, output


@pytest.mark.parametrize("line", LINES)
def test_the_line_runs(
    line: str,
    files: Path,
    own_parts: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if line.startswith(HARNESS):
        run_harness(line, monkeypatch)
        assert "|niah_single_1|" in capsys.readouterr().out
        return
    arguments, output = tiny(line)
    status = main(arguments)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    # Every token ends the model's answer, and what goes into a file is not shown.
    assert shown.out.strip() or arguments[0] == "generate"
    assert shown.out + shown.err
    if output:
        Path(output).write_text(shown.out)
    if "--out" in arguments:
        out = Path(arguments[arguments.index("--out") + 1])
        assert out.is_file() or any(out.iterdir())


def run_harness(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = shlex.split(HUB.sub(str(default_model()), line))[3:]
    arguments[arguments.index("--limit") + 1] = "1"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    runpy.run_module("kvpolicy.integrations.lm_eval", run_name="__main__")
