"""The `kvpolicy` command: what it prints, and one line for whatever a user can get wrong."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.evaluation import load, needle_prompts
from kvpolicy.evaluation.commands.app import app
from kvpolicy.evaluation.commands.work import compare as command_compare
from kvpolicy.evaluation.commands.work import generate as command_generate
from kvpolicy.evaluation.commands.terminal import progress_shown
from kvpolicy.evaluation.comparison import rows
from kvpolicy.evaluation.comparison.settings import SHOWN
from kvpolicy.registry import registered
from tests.evaluation.support import Run, fails


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompt = needle_prompts(128, count=2, seed=5)[0]
    file = tmp_path_factory.mktemp("prompts") / "needle.txt"
    file.write_text(load().tokenizer.decode(list(prompt.input_ids)) + "\n")
    return file


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"kvpolicy {kvpolicy.__version__}\n", "")
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for command in ("compare", "generate", "policies"):
        assert command in out
        assert run(command, "--help")[0] == 0
    assert run() == (status, out, err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option"),
        (["estimate"], "Missing option '--config'"),
        (["compare", "--rate", "much"], "Invalid value for '--rate'"),
        (["compare", "--context", "63"], "Invalid value for '--context'"),
        (["compare", "--count", "1"], "Invalid value for '--count'"),
        (["compare", "--rounds", "0"], "Invalid value for '--rounds'"),
        (["compare", "--threads", "0"], "Invalid value for '--threads'"),
        (["compare", "extra"], "unexpected extra argument"),
    ],
)
def test_wrong_command_line(run: Run, arguments: list[str], said: str) -> None:
    fails(run(*arguments), 2, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "nope"], "no policy is named 'nope'; known: adakv, chunkkv, "),
        (["--rate", "0"], "retention_rate must be in (0, 1], got 0.0"),
        (["--rate", "1.5"], "retention_rate must be in (0, 1], got 1.5"),
        (["--threads", "100000"], "threads must be at most the machine's"),
        (["--dtype", "int7"], "dtype must be one of auto, float32, bfloat16, float16"),
        (["--device", "abacus"], "device must be one torch can use here, got 'abacus'"),
        (["--tsp-layer", "6"], "tsp_layer must be in [0, 5]"),
        (["--model", "./no/such"], "model ./no/such does not exist"),
        (["--model", "some/model"], "--prompts-file must be given with --model some/model"),
        (["--prompts-file", "no-such.jsonl"], "prompts file no-such.jsonl does not exist"),
    ],
)
def test_compare_bad_input(run: Run, arguments: list[str], said: str) -> None:
    if arguments[0] == "--model" and "does not exist" in said:
        arguments = [*arguments, "--prompts-file", __file__]
    fails(run("compare", *arguments), 1, said)


def test_compare_bad_prompts_and_folders(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("")
    fails(run("compare", "--prompts-file", file), 1, "is empty")
    file.write_text('{"prompt": "f1", "answer": "f2"}\n{"prompt": "f1"}\n')
    fails(run("compare", "--prompts-file", file), 1, f"line 2 of {file} must be a JSON object")
    fails(run("compare", "--out", file), 1, f"out must be a folder, got {file}")
    fails(run("compare", "--model", file, "--prompts-file", file), 1, "got a file")
    fails(run("compare", "--model", tmp_path, "--prompts-file", file), 1, "config.json")
    assert list(tmp_path.iterdir()) == [file]


def test_compare_prints_a_table_and_writes(run: Run, tmp_path: Path) -> None:
    small = ("--context", 96, "--speed-context", 128, "--count", 4)
    out = tmp_path / "out"
    status, shown, _ = run("compare", "-p", "snapkv", "-r", 0.2, *small, *QUICK, "--out", out)
    assert status == 0
    assert max(map(len, shown.split("\nwritten")[0].splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()]
    (snap,) = (row for row in rows if row[:1] == ["snapkv"] and len(row) == 6)
    (full,) = (row for row in rows if row[:1] == ["full_context"] and len(row) == 6)
    assert (full[2:], snap[2:]) == (["393", "100.0", "1.00", "1.00"], ["77", "19.5", "-", "-"])
    assert "1 thread," in shown
    text = " ".join(shown.split())
    assert "times as fast: a random Llama of 6 layers on that prompt, against the same" in text
    assert "-: no speed, since rounds disagree or are fewer than 5." in text
    assert "No speed can be relied on" in text
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "compare.png"]


QUICK = ("--rounds", 1, "--answer-tokens", 1, "--threads", 1)
FEW = ("--context", 96, "--speed-context", 96, "--count", 2)


def test_progress_is_flushed_line_by_line_into_a_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file, a line says which policy answers, before the next one is asked."""
    seen: list[str] = []
    real = rows.measure_accuracy

    class Out(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Out()

    def measure(*args: Any, **kwargs: Any) -> Any:
        seen.append(out.flushed)
        return real(*args, **kwargs)

    monkeypatch.setattr(rows, "measure_accuracy", measure)
    monkeypatch.setattr(sys, "stdout", out)
    arguments = ("-p", "snapkv", "-p", "tova", "-r", 0.2, *FEW, *QUICK)
    assert run("compare", *arguments)[0] == 0
    assert [text.splitlines()[-1] for text in seen] == [
        "timing, in turns ...",
        "answers of full_context ...",
        "answers of snapkv 0.2 ...",
    ]
    assert "\x1b" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert re.search(r"^snapkv .* - +-$", out.getvalue(), flags=re.MULTILINE)


def test_a_sweep_says_where_it_is(run: Run) -> None:
    few = ("-p", "fastkv", "-r", 0.5, *FEW)
    status, shown, _ = run("compare", *few, "--sweep-rates", *QUICK)
    assert status == 0
    assert "sweep: TSP rate 0.4, retention rate 0.4 ..." in shown.splitlines()


def test_a_terminal_gets_a_bar(run: Run) -> None:
    """On a terminal there is a bar, and no line of stages."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, soft_wrap=True)
    with progress_shown(console) as progress:
        progress("answers of tova", 1, 2)
        progress("sweep: all", 1, 2)
    assert "sweep: all ..." not in out.getvalue()
    assert "1/2" in out.getvalue()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each comparison that is asked for; none is run."""
    found: list[Any] = []

    def refuse(settings: Any, *_: object) -> None:
        found.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr(command_compare, "check", refuse)
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ((0.02, 0.05), 32, 5, 2, 120.0)),
        (("--thorough",), ((0.02, 0.1, 0.2), 200, 9, 9, None)),
        (("--thorough", "-r", 0.3, "--count", 8, "--rounds", 2), ((0.3,), 8, 2, 0, None)),
        (("--rounds", 9), ((0.02, 0.05), 32, 9, 0, None)),
    ],
)
def test_how_much_is_compared(
    run: Run, arguments: tuple[object, ...], expected: object, asked: list[Any]
) -> None:
    assert run("compare", *arguments)[0] == 1
    (found,) = asked
    measured = (found.rates, found.count, found.rounds, found.again, found.timing_seconds)
    assert measured == expected


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), SHOWN),
        (("--all",), ()),
        (("--thorough",), ()),
        (("-p", "tova,fastkv"), ("tova", "fastkv")),
        (("--scorer", "last_query"), ()),
    ],
)
def test_which_policies_are_compared(
    run: Run, arguments: tuple[str, ...], names: object, asked: list[Any]
) -> None:
    """Eleven and full context; with --all and without names, all that are registered."""
    assert run("compare", *arguments)[0] == 1
    assert asked[0].asked_policies.names == names
    assert len(SHOWN) + 1 <= 12
    assert set(SHOWN) <= set(registered("policy"))


def test_a_sweep_on_prompts_as_short_as_the_window(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "f1 f2", "answer": "f3"}\n{"prompt": "f4 f5", "answer": "f6"}\n')
    quick = ("-p", "fastkv", "-r", 0.5, "--rounds", 1, "--answer-tokens", 1, "--threads", 1)
    status, shown, err = run("compare", "--prompts-file", file, "--sweep", *quick)
    assert (status, err) == (0, "")
    said = "No TSP layer was calibrated: prompts must be longer than the window of 8 tokens"
    assert said in " ".join(shown.split())
    assert re.search(r"^ +full +[\d.]+ *$", shown, flags=re.MULTILINE)


def test_compare_under_a_bound(run: Run, tmp_path: Path) -> None:
    """A bound that nothing needs leaves the answers; one below the facts breaks them off."""
    asked = ("--context", 64, "--count", 4, "-p", "streamingllm", "--speed-context", 64)
    for tokens, holds in ((512, True), (8, False)):
        bound = ("-r", 1.0, "--decoding-tokens", tokens, "--decoding-every", 1)
        status, shown, _ = run("compare", *asked, *bound, *QUICK, "--out", tmp_path)
        assert status == 0
        assert "4 needle prompts of 64 tokens; first all speeds" in shown
        data = json.loads((tmp_path / "compare.json").read_text())
        assert data["settings"]["prompts"] == "needle"
        full, bounded = (row["exact_match"] for row in data["rows"])
        assert list(full) == ["one-hop", "two-hop"]
        assert (full == bounded) is holds
        share = sum(each["matches"] for each in bounded.values()) / 4
        table = shown[shown.index("\npolicy ") :].splitlines()[2:4]
        assert [line.split()[1] for line in table] == ["100", f"{100 * share:.0f}"]


def test_prompts_have_the_models_length(run: Run, asked: list[Any]) -> None:
    assert run("compare")[0] == 1
    assert run("compare", "--context", 99)[0] == 1
    assert [each.context for each in asked] == [1024, 99]


def test_compare_on_prompts_of_a_file(run: Run, tmp_path: Path) -> None:
    """The bundled model's own answers are matched as text; a wrong one is not."""
    decode = load().tokenizer.decode
    prompts = [each for each in needle_prompts(96, count=8, seed=2) if each.kind == "one-hop"]
    lines = [
        f'{{"prompt": "{decode(list(each.input_ids))}", "answer": "{decode(list(answer))}"}}'
        for each in prompts
        for answer in each.answers
    ]
    file = tmp_path / "prompts.jsonl"
    quick = ("-p", "full-context", "--rounds", 1, "--answer-tokens", 1, "--threads", 1)

    def score() -> float:
        file.write_text("\n".join(lines))
        status, shown, _ = run("compare", "--prompts-file", file, *quick)
        assert status == 0
        found = re.search(r"^full_context +(\d+) ", shown, flags=re.MULTILINE)
        assert found is not None
        return float(found[1])

    before = score()
    assert before >= 50.0
    lines[:] = [line.replace('"answer": "', '"answer": "f1 ') for line in lines]
    assert score() == 0.0


def test_compare_with_a_saved_model(run: Run, tmp_path: Path) -> None:
    loaded = load()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "f1 f2 f3", "answer": "f4"}\n')
    quick = ("-p", "fastkv", "--rounds", 1, "--answer-tokens", 1, "--threads", 1)
    status, shown, _ = run("compare", "--model", tmp_path / "model", "--prompts-file", file, *quick)
    assert status == 0
    assert "chosen from the sweep" not in shown


def test_generate_streams_and_reports(run: Run, prompt_file: Path) -> None:
    status, out, err = run("generate", "--prompt-file", prompt_file, "--answer-tokens", 3)
    assert status == 0
    assert len(out.split()) == 3
    assert "FastKV(retention_rate=0.1, tsp_layer=2, tsp_rate=0.2), prompt of 128 tok" in err
    assert re.search(r"^total +130 +14.0 ", err, flags=re.MULTILINE)  # int(12.8) + 2 appended


def test_generate_takes_the_prompt_itself(run: Run, prompt_file: Path) -> None:
    text = prompt_file.read_text().rstrip()
    given = run("generate", "--prompt", text, "--answer-tokens", 3)
    read = run("generate", "--prompt-file", prompt_file, "--answer-tokens", 3)
    assert (given[0], given[1]) == (0, read[1])
    wanted = "one of --prompt-file and --prompt must be given, got "
    fails(run("generate"), 1, f"{wanted}neither")
    fails(run("generate", "--prompt", text, "--prompt-file", prompt_file), 1, f"{wanted}both")
    fails(run("generate", "--prompt", " "), 1, "--prompt must be a text, got an empty one")


def test_generate_answers_under_full_context(run: Run, prompt_file: Path) -> None:
    _, out, _ = run(
        "generate", "--prompt-file", prompt_file, "-p", "full_context", "--answer-tokens", 3
    )
    prompt = needle_prompts(128, count=2, seed=5)[0]
    assert out.split() == load().tokenizer.decode(list(prompt.answers[0])).split()


def test_ctrl_c_leaves_one_line(
    run: Run, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_generate, "load_shown", interrupt)
    status, out, err = run("generate", "--prompt-file", prompt_file)
    assert (status, out) == (130, "")
    assert err == "error: interrupted\n"


def test_generate_sampling_follows_its_seed(run: Run, prompt_file: Path) -> None:
    def sampled(seed: int) -> str:
        arguments = ("--sample", "--temperature", 9, "--seed", seed, "--answer-tokens", 12)
        return run("generate", "--prompt-file", prompt_file, *arguments)[1]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "nope"], "no policy is named 'nope'; known: "),
        (["-p", "snapkv", "--tsp-rate", "0.3"], "--set tsp_rate must name a parameter"),
        (["--rate", "0.5", "--tsp-rate", "0.2"], "retention_rate must not exceed tsp_rate"),
        (["--retention-rate", "2"], "retention_rate must be in (0, 1], got 2.0"),
        (["--tsp-layer", "6"], "tsp_layer must be in [0, 5] for a model of 6 layers, got 6"),
        (["--tsp-layer", "-1"], "tsp_layer must be at least 0"),
        (["--sample", "--temperature", "0"], "temperature must be above 0"),
        (["--chat"], "--chat needs a chat template"),
        (["--model", "/no/such/model"], "model /no/such/model does not exist"),
    ],
)
def test_generate_bad_input(run: Run, prompt_file: Path, arguments: list[str], said: str) -> None:
    fails(run("generate", "--prompt-file", prompt_file, *arguments), 1, said)


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


def test_generate_with_a_chat_template(
    run: Run, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load()
    loaded.tokenizer.chat_template = (
        "{% for message in messages %}f1 {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}f2 f3{% endif %}"
    )
    monkeypatch.setattr(command_generate, "load_shown", lambda *each: loaded)
    for option, count in ((["--chat"], 131), ([], 131), (["--no-chat"], 128)):
        arguments = ("--prompt-file", prompt_file, "--answer-tokens", 1, *option)
        assert f"prompt of {count} tokens" in run("generate", *arguments)[2]


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
        "    retention_rate=0.1, decoding=None, window_size=8, retention_tokens=None,",
        "    protect=0, kernel_size=7, group_first=False",
    ]
    order = [line for line in lines if line and not line.startswith(" ")]
    assert order == ["policy", "scorer", "selector", "propagation"]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else []), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_brings_in_nothing_optional() -> None:
    code = """
import sys, kvpolicy.evaluation
print(sorted({"typer", "rich", "matplotlib", "transformers"} & set(sys.modules)))
"""
    assert python(code).stdout == "[]\n"


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
    result = python(code)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"error: {missing} is not installed; get it with: pip install 'kvpolicy[{extra}]'\n"
    )


def test_module_runs_as_the_command() -> None:
    result = python("", "-m", "kvpolicy.evaluation", "--version")
    assert (result.returncode, result.stdout) == (0, f"kvpolicy {kvpolicy.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "meta"), "device must be one that holds numbers, got 'meta'"),
        (("--sample", "--seed", 2**63), "seed must be in [0, 2**63)"),
        (("--sample", "--temperature", "inf"), "temperature must be above 0 and finite, got inf"),
    ],
)
def test_generate_refuses_values_that_torch_would(
    run: Run, prompt_file: Path, arguments: tuple[object, ...], said: str
) -> None:
    fails(run("generate", "--prompt-file", prompt_file, *arguments), 1, said)
