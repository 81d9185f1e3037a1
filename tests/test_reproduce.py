"""docs/reproduce.md: its commands run to their end at a tiny size, its counts are as printed.

bash itself expands every block, its commands writing down their arguments. What is then replaced:

- the model by a random Llama of four layers, whose answers have one token, on the CPU (`OPTIONS`);
- ``long.txt`` by a few made-up lines: the names stay, the working folder is another;
- the top 512 tokens by 4, filter layers by 1;
- loops over rates and layers by two of each (`LOOPS`);
- the shape and lengths of benchmarks/gpu.py by those of its ``--quick`` (`ADDED`).

Estimates and counts, which take no time, run as they stand. Of `kvpolicy eval`, whose data must be
downloaded, options, policies and tasks are checked.
"""

import contextlib
import io
import itertools
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks import gpu, operations
from kvpolicy.evaluation.cli import main
from tests.integrations.lm_eval.support import CHAT
from tests.pages import printed, text_of
from tests.reference.models import VOCAB_SIZE, tiny_model

PAGE = text_of("docs/reproduce.md")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using slow pure-python SequenceMatcher:UserWarning", "ignore::SyntaxWarning"
)

LAYERS = 4
OPTIONS = {"--model": "model", "--device": "cpu", "--top-k": "4"}
ADDED = {
    "benchmarks/gpu.py": ("--quick", "--threads", "1", "--contexts", "64", "--new-tokens", "3")
}
LOOPS = {"0.1 0.2 0.3 0.4 0.5;": "0.3 0.5;", "0 5 10 15 20 25 30;": "0 3;"}

# The commands write down what they are given, in place of doing it.
SHELL = r"""
say() { printf '%s\037' "$@"; printf '\036'; }
kvpolicy() { say kvpolicy "$@"; }
python() { say python "$@"; }
"""
MARK = "*Runs, not measured here"


@attrs.frozen
class Block:
    """A fenced block of the page.

    Args:
        section: The heading that it stands under.
        language: Of the fence.
        text: What it holds.
        marked: Whether the text before it has the mark.
    """

    section: str
    language: str
    text: str
    marked: bool

    @property
    def commands(self) -> list[list[str]]:
        """Its commands, as bash understands them."""
        script = self.text
        if "kvpolicy eval" in script:
            for long, short in LOOPS.items():
                script = script.replace(long, short)
        bash = shutil.which("bash")
        assert bash is not None
        ran = subprocess.run(
            [bash, "-euc", f"{SHELL}\n{SETUP}\n{script}"],
            env={"PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        return [each.split("\037")[:-1] for each in ran.stdout.split("\036")[:-1]]


def blocks() -> Iterator[Block]:
    section, between = "", ""
    for part in re.split(r"(^```\w*\n.*?^```$)", PAGE, flags=re.MULTILINE | re.DOTALL):
        if not part.startswith("```"):
            between = part
            section = (re.findall(r"^## (.*)$", part, re.MULTILINE) or [section])[-1]
            continue
        language, text = re.fullmatch(r"```(\w*)\n(.*)```", part, re.DOTALL).groups()  # type: ignore[union-attr]
        yield Block(section, language, text, MARK in between)


SETUP = ""  # the names that all blocks share
INSTALL, SETTING, *BLOCKS = list(blocks())
SETUP = SETTING.text
SECTIONS = list(dict.fromkeys(each.section for each in BLOCKS))


def test_every_command_has_its_mark() -> None:
    assert INSTALL.text.startswith("pip install")
    assert SETTING.commands == []
    for block in BLOCKS:
        if block.language == "python":  # reads what the block before it wrote
            continue
        assert block.language == "bash"
        assert block.marked, block.text
        assert block.commands


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A token a word, most of them unknown ones: RULER's prompts are short in it."""
    names = ["<pad>", "<eos>", "<unk>", *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model and data."""
    folder = tmp_path_factory.mktemp("reproduce")
    rng = random.Random(0)
    words = [f"{first}{second}" for first in "bdfglmnprs" for second in "aeiou"]
    words += [f"{word}n" for word in words][: VOCAB_SIZE - 4 - len(words)]
    words.append("the")  # which every prompt has: one in unknown words alone is refused
    model = tiny_model("llama", seed=1, num_layers=LAYERS)
    model.config.max_position_embeddings = 4096
    # Every token ends the answer: hundreds that LongBench allows would show nothing more.
    model.generation_config.eos_token_id = list(range(VOCAB_SIZE))
    model.save_pretrained(folder / "model")
    word_tokenizer(words).save_pretrained(folder / "model")

    def text(sentences: int) -> str:
        return " ".join(
            f"{' '.join(rng.choices(words, k=9)).capitalize()}." for _ in range(sentences)
        )

    (folder / "long.txt").write_text(text(9))
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    with contextlib.chdir(folder):
        yield folder
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def tiny(command: list[str]) -> list[str]:
    """A command of the page with what is replaced, see above."""
    found = list(command)
    for at, (option, given) in enumerate(itertools.pairwise(command), start=1):
        if option in OPTIONS:
            found[at] = OPTIONS[option]
        elif given.startswith("filter_layer=") and "estimate" not in command:
            found[at] = "filter_layer=1"
    return [*found, *ADDED.get(command[1], ())]


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def rows(section: str, label: str) -> list[list[str]]:
    """The lines of a section's tables that begin with a label, without it."""
    start = PAGE.index(f"\n## {section}\n")
    text = PAGE[start:].split("\n## ")[1]
    found = re.findall(rf"^\| {re.escape(label)} \| (.*) \|$", text, re.MULTILINE)
    return [[each.strip() for each in line.split("|")] for line in found]


def check_eval(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Options, policies and tasks are right: the only thing that is missing is a model."""
    at = command.index("--model") + 1
    assert main([*command[1:at], "no/model/here", *command[at + 1 :]]) == 1
    assert "error: model no/model/here does not exist" in capsys.readouterr().err


def check_estimate(command: list[str]) -> None:
    """The policies that were asked for, and FastKV's rate as the paper has it."""
    record = json.loads(Path(value(command, "--json")).read_text())
    assert record["settings"]["context"] == int(value(command, "--context"))
    assert {row["policy"] for row in record["rows"]} == set(value(command, "-p").split(","))
    rates = [each["prefill_compute_rate"] for each in record["rows"] if each["policy"] == "fastkv"]
    assert [round(rate, 3) for rate in rates] == [0.6, 0.6]


def check_operations(command: list[str]) -> None:
    """The page's numbers are those that are printed; for other settings there are some."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        operations.main(command[2:])
    allowed = [line.split(": ")[1] for line in printed.getvalue().splitlines()]
    if "--tsp-rate" not in command:
        assert rows("What the operation count allows", "counted here") == [allowed]
        return
    assert 1 < float(allowed[0]) < 16


def check_analyze(command: list[str]) -> None:
    folder = Path(value(command, "--out"))
    record = json.loads((folder / "analyze.json").read_text())
    assert record["overlap"]["k"] == int(value(command, "--top-k"))
    assert record["distances"]["tsp_rate"] == float(value(command, "--tsp-rate"))
    assert record["distances"]["layers"] == record["overlap"]["layers"] == list(range(LAYERS))
    assert (folder / "analyze.png").read_bytes().startswith(b"\x89PNG")


def check_gpu(command: list[str]) -> None:
    """Every cell of the line's methods and parts was measured, and nothing else."""
    record = json.loads((Path(value(command, "--out")) / "gpu.json").read_text())
    jobs = gpu.options_of(command[2:]).jobs
    assert record["complete"] is True
    for part in gpu.PARTS:
        rows = record[part]
        assert sorted((row["policy"], row["context"]) for row in rows) == sorted(
            (job.policy, job.context) for job in jobs if job.part == part
        )
        assert {row["status"] for row in rows} <= {"measured"}
    assert {"full_context", "fastkv"} <= {cell["policy"] for cell in record["cells"]}
    for cell in record["cells"]:
        assert cell["prefill_ms"]
        assert cell["decode_ms"]
        if cell["policy"] == "fastkv":
            assert 0 < cell["scoring_share"] < 1


CHECKS = {
    "estimate": check_estimate,
    "analyze": check_analyze,
    "benchmarks/gpu.py": check_gpu,
    "benchmarks/operations.py": check_operations,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_was_not_measured_runs(
    section: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in BLOCKS:
        if block.section != section:
            continue
        if block.language == "python":
            for folder, count in (("chat", 11), ("plain", 5)):
                table = Path("repro/longbench-llama", folder, "table.csv")
                table.parent.mkdir(parents=True)
                table.write_text("policy,score\n" + "full_context,50\nfastkv 0.1,40\n" * count)
            check_averages(block.text)
            continue
        commands = block.commands
        for command in map(tiny, commands):
            if command[1] == "eval":
                check_eval(command, capsys)
                continue
            if command[0] == "kvpolicy":
                status = main(command[1:])
                assert status == 0, capsys.readouterr().err
            elif command[1] == "benchmarks/gpu.py":
                gpu.main(command[2:])
            CHECKS[command[1]](command)


def check_averages(code: str) -> None:
    assert printed(code).splitlines() == [
        "full_context 50.00 of 16 tasks",
        "fastkv 0.1 40.00 of 16 tasks",
    ]
