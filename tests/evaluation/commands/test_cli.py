"""The `kvpolicy` command: what it prints, and one line for whatever a user can get wrong."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.evaluation import load
from kvpolicy.evaluation.commands import terminal
from kvpolicy.evaluation.commands.app import app
from kvpolicy.evaluation.commands.terminal import progress_shown
from kvpolicy.registry import registered
from tests.evaluation.support import NEEDLE, Run, fails, works
from tests.needle import needle_prompts
from tests.processes import python


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompt = needle_prompts(128, count=2, seed=5)[0]
    file = tmp_path_factory.mktemp("prompts") / "needle.txt"
    file.write_text(load(str(NEEDLE)).tokenizer.decode(list(prompt.input_ids)) + "\n")
    return file


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"kvpolicy {kvpolicy.__version__}\n", "")
    out = works(run("--help"))
    for command in ("compare", "generate", "policies"):
        assert command in out
        assert run(command, "--help")[0] == 0
    assert works(run()) == out


def test_a_terminal_gets_a_bar(run: Run) -> None:
    """On a terminal there is a bar, and no line of stages."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, soft_wrap=True)
    with progress_shown(console) as progress:
        progress("answers of tova", 1, 2)
        progress("sweep: all", 1, 2)
    assert "sweep: all ..." not in out.getvalue()
    assert "1/2" in out.getvalue()


def test_generate_streams_and_reports(run: Run, prompt_file: Path) -> None:
    status, out, err = run("generate", "--prompt-file", prompt_file, "--answer-tokens", 3)
    assert status == 0
    assert len(out.split()) == 3
    assert "ReplayKV(retention_rate=0.2, tsp_rate=1.0), prompt of 128 tokens" in err
    assert re.search(r"^total +130 +27.0 ", err, flags=re.MULTILINE)  # int(25.6) + 2 appended


def test_generate_takes_the_prompt_itself(run: Run, prompt_file: Path) -> None:
    text = prompt_file.read_text().rstrip()
    given = run("generate", "--prompt", text, "--answer-tokens", 3)
    read = run("generate", "--prompt-file", prompt_file, "--answer-tokens", 3)
    assert (given[0], given[1]) == (0, read[1])


def test_generate_answers_under_full_context(run: Run, prompt_file: Path) -> None:
    _, out, _ = run(
        "generate", "--prompt-file", prompt_file, "-p", "full_context", "--answer-tokens", 3
    )
    prompt = needle_prompts(128, count=2, seed=5)[0]
    assert out.split() == load(str(NEEDLE)).tokenizer.decode(list(prompt.answer)).split()


def test_ctrl_c_leaves_one_line(
    run: Run, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "load_shown", interrupt)
    status, out, err = run("generate", "--prompt-file", prompt_file)
    assert (status, out) == (130, "")
    assert err == "interrupted\n"


def test_generate_sampling_follows_its_seed(run: Run, prompt_file: Path) -> None:
    def sampled(seed: int) -> str:
        arguments = ("--sample", "--temperature", 9, "--seed", seed, "--answer-tokens", 12)
        return run("generate", "--prompt-file", prompt_file, *arguments)[1]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "does not exist"), (b"\n", "is empty"), (b"\xff\0", "UTF-8")]
)
def test_generate_bad_prompt_file(
    run: Run, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    fails(run("generate", "--prompt-file", file), 1, said)


def test_policies_lists_everything_in_80_columns() -> None:
    result = CliRunner().invoke(app, ["policies"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name, factory in registered().items():
        paper = getattr(factory, "paper", "")
        assert f"  {name}" + (f"  ({paper})" if paper else "") in lines
    start = lines.index("  snapkv  (arXiv 2404.14469)")
    assert lines[start + 2 : start + 4] == [
        "    retention_rate=0.1, prefill_block=None, decoding=None, window_size=8,",
        "    retention_tokens=None, protect=0, kernel_size=7, group_first=False",
    ]
    order = [line for line in lines if line and not line.startswith(" ")]
    assert order == ["policy", "scorer", "selector", "propagation"]


def test_import_brings_in_nothing_optional() -> None:
    code = """
import sys, kvpolicy.evaluation
print(sorted({"typer", "rich", "matplotlib", "transformers"} & set(sys.modules)))
"""
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("typer", "cli", "['policies']"),
        ("rich", "cli", "['policies']"),
        ("matplotlib", "plot", "['compare', '--out', 'never-made']"),
    ],
)
def test_missing_extra_is_named(missing: str, extra: str, arguments: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from kvpolicy.evaluation.cli import main
sys.exit(main({arguments}))
"""
    result = python("-c", code, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"error: {missing} is not installed; get it with: pip install 'kvpolicy[{extra}]'\n"
    )


def test_module_runs_as_the_command() -> None:
    result = python("-m", "kvpolicy.evaluation", "--version")
    assert (result.returncode, result.stdout) == (0, f"kvpolicy {kvpolicy.__version__}\n")
