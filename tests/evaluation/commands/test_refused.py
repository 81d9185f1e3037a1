"""Command lines that are refused: one line says why, nothing is written, no model is loaded."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.commands import terminal
from kvpolicy.evaluation.estimate.presets import PRESETS
from tests.evaluation.support import Run, fails

LLAMA = "estimate --config llama-3.1-8b --json costs.json"
COSTS = f"{LLAMA} --context 64"
GENERATE = "generate --prompt-file prompt.txt"
POLICIES = (
    "no policy is named 'fastvk' (did you mean fastv or fastkv?) or 'snapvk' (did you mean "
    "snapkv?); known: adakv, "
)

# What the command line does not have.
USAGE: dict[str, str] = {
    "nope": "No such command 'nope'",
    "complare": "Did you mean 'compare'",
    "--nope": "No such option",
    "compare --rate much": "Invalid value for '--rate'",
    "compare --context 0": "Invalid value for '--context'",
    "compare --count 0": "Invalid value for '--count'",
    "compare --rounds -1": "Invalid value for '--rounds'",
    "compare --threads 0": "Invalid value for '--threads'",
    "compare extra": "unexpected extra argument",
    "analyze --count 0": "Invalid value for '--count'",
    "calibrate --count 0": "Invalid value for '--count'",
    "estimate --json costs.json --context 8": "Missing option '--config'",
    LLAMA: "Missing option '--context'",
    f"{LLAMA} --context 0": "Invalid value for '--context'",
    f"{COSTS} --answer-tokens 0": "Invalid value for '--answer-tokens'",
    f"{COSTS} --rate much": "Invalid value for '--rate'",
    "compare --contxt 64": "No such option: --contxt (did you mean --context?) (see",
    "compare --contxt=64 -p snapkv --sed 3 --x -- --more": (
        "No such options: --contxt (did you mean --context?), --sed (did you mean --seed?), "
        "--x (see --help)"
    ),
}
# What does not fit together, or is no name; refused before a model is loaded.
EARLY: dict[str, str] = {
    "compare -p snapkv,": "--policy must be names separated by commas, got 'snapkv,'",
    "eval --tasks , --out x": "--tasks must be names separated by commas, got ','",
    "eval --tasks a --lengths 1,,2 --out x": "--lengths must be numbers of tokens",
    f"{COSTS} --decoding-tokens 0": "--decoding-tokens must be at least 1, got 0",
    f"{COSTS} --decoding-tokens 9 --decoding-every 0": "--decoding-every must be at least 1, got 0",
    "compare --decoding-tokens 0 --decoding-every 8": "--decoding-tokens must be at least 1, got 0",
    "compare --decoding-tokens 0": "--decoding-tokens must be at least 1, got 0",
    "compare --decoding-tokens 8 --decoding-every 0": "--decoding-every must be at least 1, got 0",
    f"{GENERATE} --decoding-tokens 9 --decoding-every -1": (
        "--decoding-every must be at least 1, got -1"
    ),
    f"{GENERATE} -p snapkv,h2o": "--policy must be one here, got snapkv, h2o",
    f"{GENERATE} -p snapkv --scorer last_query": (
        "--policy must be left out where parts are given, got snapkv"
    ),
    f"{GENERATE} -r 0.1 -r 0.2": "--rate must be one here, got 0.1, 0.2",
    "generate": "one of --prompt-file and --prompt must be given, got neither",
    f"{GENERATE} --prompt f1": "one of --prompt-file and --prompt must be given, got both",
    "generate --prompt ' '": "--prompt must be a text, got an empty one",
    # Misspelt names: all of them are told, each with the nearest known name.
    "compare -p fastvk,snapvk": POLICIES,
    "estimate --config x --context 9 -p fastvk -p snapvk": POLICIES,
    "eval -t x --out no-such -p fastvk,snapvk": POLICIES,
    "generate --prompt-file - -p Snap-VK": "'Snap-VK' (did you mean snapkv?); known: ada",
    "compare -p snapvk --scorer lst_query --selector kep_al": "(did you mean snapkv?)",
    "compare --scorer lst_query --selector kep_al -p snapvk": "(did you mean last_query?)",
    "compare --selector kep_al -p snapvk --scorer lst_query": "(did you mean keep_all?)",
    "compare -p snapkv --set windw_size=3 --set kernl_size=3": (
        "--set windw_size (did you mean window_size?) and --set kernl_size (did you mean "
        "kernel_size?) must name a parameter of a chosen policy"
    ),
    "compare --scorer window_max_pool:windw_size=3,x=1": (
        "--scorer window_max_pool takes no windw_size (did you mean window_size?) or x; it "
    ),
}
FASTKV = "compare -p fastkv --set tsp_layer=6 --task asked.jsonl"
MEASURE = "--model MODEL --context 700 --count 2 --threads 1"
OPTIONS: dict[str, str] = {
    "--tsp-rate 0": "tsp_rate must be in (0, 1], got 0.0",
    "--tsp-rate nan": "tsp_rate must be in (0, 1], got nan",
    "--context 9": "for a prompt of needles with this tokenizer, got 9",
    "--threads 100000": "threads must be at most the machine's",
    "--task neddles --dtype int7": "or a file of JSON lines that exists, got 'neddles'",
    "--model ./no/such": "model ./no/such does not exist",
    "--dtype int7": "dtype must be one of auto",
    f"--out {__file__}": "out must be a folder",
    "--context 1100": "prompts must fit into the 1,024 positions of",
}
LATE: dict[str, str] = {
    "estimate --config gpt-17 --context 64": f"preset ({', '.join(PRESETS)}), a preset's Hub name",
    "estimate --config . --context 64": "config folder . must hold a config.json, got none",
    f"{COSTS} --policies nope": "no policy is named 'nope'; known: ",
    f"{COSTS} --rate 0": "retention_rate must be in (0, 1], got 0.0",
    f"{COSTS} --rate 1.5": "retention_rate must be in (0, 1], got 1.5",
    f"{COSTS} --rate nan": "retention_rate must be in (0, 1], got nan",
    f"{COSTS} --dtype int7": "dtype must be one of float32, bfloat16",
    f"{COSTS} --set tsp_layer": "--set must be NAME=VALUE, a finite",
    f"{COSTS} --set tsp_layer=inf": "--set must be NAME=VALUE, a finite",
    f"{COSTS} --set tsp_layer=32": "tsp_layer must be in [0, 31]",
    f"{COSTS} --set tsp_layer=1.5": "tsp_layer must be an int, got 1.5",
    f"{COSTS} --set nope=1": "--set nope must name a parameter",
    f"{COSTS} --set retention_rate=1": "must be given by --rate",
    f"{COSTS} --set tsp_rate=0.05": "must not exceed tsp_rate",
    "compare --policy nope": "no policy is named 'nope'; known: adakv, chunkkv, ",
    "compare --rate 0": "retention_rate must be in (0, 1], got 0.0",
    "compare --threads 100000": "threads must be at most the machine's",
    "compare --dtype int7": "dtype must be one of auto, float32, bfloat16, float16",
    "compare --device abacus": "device must be one torch can use here, got 'abacus'",
    "compare --model ./no/such": "model ./no/such does not exist",
    "compare --task needels": "'needels' (did you mean needles?)",
    "compare --task no-such.jsonl": "or a file of JSON lines that exists, got 'no-such.jsonl'",
    "compare --tsp-layers 1,x": "--tsp-layers must be numbers separated by commas, got '1,x'",
    FASTKV: "tsp_layer must be in [0, 5] for a model of 6 layers, got 6",
    f"compare --out {__file__}": "out must be a folder, got",
    "compare --model MODEL -p snapkv --context 100": "needles with this tokenizer, got 100",
    f"{GENERATE} --device meta": "device must be one that holds numbers, got 'meta'",
    f"{GENERATE} --sample --seed {2**63}": "seed must be in [0, 2**63)",
    f"{GENERATE} --sample --temperature inf": "temperature must be above 0 and finite, got inf",
    f"{GENERATE} --policy nope": "no policy is named 'nope'; known: ",
    f"{GENERATE} -p snapkv --set tsp_rate=0.3": "--set tsp_rate must name a parameter",
    f"{GENERATE} -p fastkv --rate 0.5 --set tsp_rate=0.2": "rate must not exceed tsp_rate",
    f"{GENERATE} --retention-rate 2": "retention_rate must be in (0, 1], got 2.0",
    f"{GENERATE} -p fastkv --set tsp_layer=-1": "tsp_layer must be at least 0",
    f"{GENERATE} --sample --temperature 0": "temperature must be above 0",
    f"{GENERATE} --chat": "--chat needs a chat template",
    f"{GENERATE} --model /no/such/model": "model /no/such/model does not exist",
    "generate --prompt 'f1 f2' --ask ' '": "--ask must be a text, got an empty one",
    "generate --prompt 'f1 f2' --ask what?": (
        "question must have words that the tokenizer knows, got"
    ),
    f"generate --prompt 'f1 f2' --ask '{'f1 ' * 4300}'": (
        "prompts must fit into the 4,224 positions"
    ),
    **{
        f"{command} {MEASURE} --out out {given}": said
        for command in ("analyze", "calibrate")
        for given, said in OPTIONS.items()
    },
    f"calibrate {MEASURE} --criterion best": "criterion must be one of argmin, earliest",
    f"calibrate {MEASURE} --tolerance 0": "tolerance must be above 0 and finite",
    f"calibrate {MEASURE} --max-layer 4": "max_layer must be in [0, 3], from the first layer",
    f"calibrate {MEASURE} --set tsp_layer=3": "--set must name one of window_size, kernel_size",
    f"calibrate {MEASURE} --set window_size=2.5": "window_size must be an int, got 2.5",
    f"calibrate {MEASURE} --set window_size=700": "longer than window_size, 700 tokens",
    f"analyze {MEASURE} -k 701": "k must be at most the prompt's",
    f"analyze {MEASURE} --window-size 700": "longer than window_size, 700 tokens",
    f"analyze {MEASURE} --prompt-file no-such.txt": "prompt file no-such.txt does not exist",
}


# A layer that the model does not have: the message begins with the policy's name.
OUTSIDE: dict[str, str] = {
    f"{GENERATE} -p fastkv --set tsp_layer=40": "fastkv@40",
    f"{GENERATE} -p gemfilter --rate 0.2 --set filter_layer=40": "gemfilter 0.2",
    f"{GENERATE} --propagation token_selective:tsp_layer=40": (
        "token_selective_propagation:tsp_layer=40"
    ),
    "compare --count 2 -p snapkv,fastkv,claa --rate 0.2 --set tsp_layer=40": "fastkv@40 0.2",
    "export --prompt-file prompt.txt --to a.safetensors -p fastkv --set tsp_layer=40": "fastkv@40",
    f"{COSTS} -p snapkv,claa --rate 0.2 --set tsp_layer=40": "claa@40 0.2",
}


@pytest.fixture
def refuses(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A check of a command line in a folder with a prompt and a question."""
    monkeypatch.chdir(tmp_path)
    asked = {"context": "f1 f2", "question": "f3", "answer": "f4"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked))
    (tmp_path / "prompt.txt").write_text("f1 f2")

    def check(line: str, status: int, said: str) -> None:
        fails(run(*shlex.split(line.replace("MODEL", str(folder)))), status, said)
        assert {each.name for each in tmp_path.iterdir()} == {"asked.jsonl", "prompt.txt"}

    return check


@pytest.mark.parametrize("line", USAGE)
def test_what_the_command_line_does_not_have(refuses: Any, line: str) -> None:
    refuses(line, 2, USAGE[line])


@pytest.mark.parametrize("line", EARLY)
def test_before_a_model_is_loaded(refuses: Any, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded first")

    monkeypatch.setattr(terminal, "load", loaded)
    refuses(line, 1, EARLY[line])


@pytest.mark.parametrize("near", ["snapkv", "last_query", "keep_all"])
def test_of_every_kind_misspelt_names_are_told(refuses: Any, near: str) -> None:
    line = "compare -p snapvk --scorer lst_query --selector kep_al"
    refuses(line, 1, f"(did you mean {near}?)")


@pytest.mark.parametrize("line", LATE)
def test_before_anything_is_done(refuses: Any, line: str) -> None:
    refuses(line, 1, LATE[line])


@pytest.mark.parametrize("line", OUTSIDE)
def test_the_policy_is_named(refuses: Any, line: str) -> None:
    last = 31 if line.startswith("estimate") else 5
    layer = "filter_layer" if "filter_layer" in line else "tsp_layer"
    said = f"{layer} must be in [0, {last}] for a model of {last + 1} layers, got 40"
    refuses(line, 1, f"error: {OUTSIDE[line]}: {said}")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files")
@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--out", "/proc/x"),
        ("calibrate", "--out", "/proc/x"),
        ("analyze", "--out", "/proc/x"),
        ("eval", "--tasks", "needle_one_hop", "--out", "/proc/x"),
        ("estimate", "--config", "phi-4", "--context", "9", "--json", "/proc/x"),
    ],
)
def test_places_are_tried_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Permissions alone do not tell: the superuser has all of them in /proc."""

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded before the place is tried")

    monkeypatch.setattr(terminal, "load", loaded)
    status, shown, err = run(*arguments)
    assert (status, shown) == (1, "")
    assert "must be a place that can be written to, got /proc/x" in err
