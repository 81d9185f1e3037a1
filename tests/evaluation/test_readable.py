"""Prompts that a model cannot read are refused alike by every command, before anything is done."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.readable import check_known, check_positions, positions_of
from tests.evaluation.support import NEEDLE, Run
from tests.integrations.lm_eval.support import char_tokenizer, documents, local_task
from tests.reference import tiny_model

POSITIONS = 256
TEXT = "It rained all night, and nobody had closed the window. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 256 positions, another without a tokenizer, and prompts of 330 tokens."""
    place = tmp_path_factory.mktemp("readable")
    model = tiny_model("llama", seed=0, num_layers=2)
    model.config.max_position_embeddings = POSITIONS
    model.save_pretrained(place / "model")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(place / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    bare = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes, **heads))
    bare.save_pretrained(place / "bare")
    (place / "long.txt").write_text(TEXT)
    row = json.dumps({"context": TEXT, "question": "was it wet", "answer": "rain"})
    (place / "long.jsonl").write_text(f"{row}\n")
    task = local_task(place, "generate_until", documents(2, words=80))
    (place / "asked.yaml").write_text(json.dumps(task))
    return place


def asked(command: str, folder: Path, model: str) -> list[str]:
    """A command about the long prompt, that takes no time."""
    file = "--task" if command in ("compare", "calibrate") else "--prompt-file"
    given = {
        "compare": ["-p", "snapkv", "--rounds", "1", "--answer-tokens", "2", "--threads", "1"],
        "calibrate": ["--threads", "1"],
        "generate": ["--answer-tokens", "2"],
        "analyze": ["--top-k", "8"],
        "eval": ["--tasks", "local_generate_until", "--include", str(folder), "--threads", "1"],
    }[command]
    path = str(folder / ("long.jsonl" if file == "--task" else "long.txt"))
    prompt = [] if command == "eval" else [file, path]
    out = ["--out", str(folder / f"{command}-{model}")] if command in ("eval", "compare") else []
    return [command, "--model", str(folder / model), *prompt, *given, *out]


COMMANDS = ("generate", "compare", "calibrate", "analyze", "eval")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "compare"])
def test_prompts_beyond_the_positions(command: str, folder: Path, run: Run) -> None:
    arguments = asked(command, folder, "model")
    status, out, err = run(*arguments)
    assert status == 1
    assert f"prompts must fit into the {POSITIONS} positions of {folder / 'model'}, got" in err
    assert "or --beyond-positions to read" in err
    assert len(err.strip().splitlines()) == 1 or command == "eval"
    assert "%" not in out  # no table of anything
    status, out, err = run(*arguments, "--beyond-positions")
    assert status == 0, err
    said = " ".join((out + err).split())
    if command != "eval":
        assert f"tokens exceed the {POSITIONS} positions that the model is made for" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_tokenizer(command: str, folder: Path, run: Run) -> None:
    status, out, err = run(*asked(command, folder, "bare"))
    assert status == 1
    assert "must have words that the tokenizer knows, got" in err
    assert "save the model's own tokenizer into its folder" in err
    assert "%" not in out
    assert not (folder / f"{command}-bare").exists()


def test_words_that_nobody_knows(run: Run, tmp_path: Path) -> None:
    """The needle model knows none of a text's words."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    status, out, err = run("generate", "--model", NEEDLE, "--prompt-file", file)
    assert (status, out) == (1, "")
    assert "unknown or special tokens; give a text in words that it knows" in err


def test_a_table_of_positions_ends_where_it_ends() -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16, "n_positions": 12}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes))
    loaded = Loaded("small", model, None)
    assert positions_of(model) == 12
    check_positions(loaded, 8, 4)
    with pytest.raises(ValueError, match="fit into the 12 positions of small, got a prompt of 9"):
        check_positions(loaded, 9, 4)
    with pytest.raises(ValueError, match="--beyond-positions must not be given with small"):
        check_positions(loaded, 9, 4, beyond=True)


def test_some_known_words_are_enough() -> None:
    tokenizer = char_tokenizer()
    check_known(tokenizer, tokenizer("a")["input_ids"], "prompt")
    with pytest.raises(ValueError, match="prompt must have words that .*, got no token"):
        check_known(tokenizer, [], "prompt")


def test_answers_in_words_that_nobody_knows(run: Run, tmp_path: Path) -> None:
    """Unknown words have no text: whatever else is answered would match."""
    for answer, got in (("zebra", "got 1 unknown"), ("s1 zebra", "got an unknown one")):
        file = tmp_path / "questions.jsonl"
        line = {"context": "KEY s110 s89", "question": "KEY s110", "answer": answer}
        file.write_text(json.dumps(line) + "\n")
        status, out, err = run("compare", "--model", NEEDLE, "-p", "snapkv", "--task", file)
        assert (status, out) == (1, "")
        assert f"line 1 of {file}: the answer must have" in err
        assert got in err
