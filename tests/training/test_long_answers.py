"""The training of the model with long answers: its rows, and a tiny run of it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.tasks.long_answers import KINDS, load_model
from kvpolicy.evaluation.tasks.long_answers.vocabulary import token_names
from training.batches import IGNORED
from training.long_answers import train
from training.long_answers.batches import MAX_POSITION, row_task
from training.long_answers.curriculum import STAGES, Stage

NAMES = token_names()
ANSWERS = [stage for stage in STAGES if stage.statements is not None]


@given(stage=st.sampled_from(ANSWERS), seed=st.integers(0, 10**6))
def test_targets_are_the_steps_that_a_reader_writes(stage: Stage, seed: int) -> None:
    batch = stage.draw(random.Random(seed))
    for index, row in enumerate(batch.input_ids.tolist()):
        words = [NAMES[token] for token in row]
        leads = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "LET"}
        first = words.index("FROM") + 2
        targets = batch.answers[index]
        assert (targets != IGNORED).nonzero()[:, 0].tolist() == list(range(first, len(words) - 1))
        said = [NAMES[token] for token in targets[first:-1].tolist()]
        assert said == words[first + 1 :]
        arrows = [at for at, word in enumerate(words) if word == "->"]
        bridges = batch.bridges[index]
        assert (bridges != IGNORED).nonzero()[:, 0].tolist() == arrows
        assert [NAMES[token] for token in bridges[arrows].tolist()] == [
            words[at - 1] for at in arrows
        ]
        here = words[first - 1]
        for at in range(0, len(said), 4):
            assert said[at : at + 4] == [here, "->", leads[here], ";"]
            here = leads[here]


@given(stage=st.sampled_from(STAGES), seed=st.integers(0, 10**6))
def test_positions_ascend_within_the_models_span(stage: Stage, seed: int) -> None:
    positions = stage.draw(random.Random(seed)).positions
    assert positions.diff(dim=1).min() >= 1
    assert positions.min() >= 0
    assert positions.max() < MAX_POSITION


@given(
    length=st.sampled_from([64, 100, 131, 1024]),
    loop_share=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_rows_have_their_length_and_kind(length: int, loop_share: float, seed: int) -> None:
    task = row_task(random.Random(seed), length, (4, 64), loop_share)
    assert task.kind == ("loop" if loop_share else "chain")
    assert task.context_len + 4 * task.steps == length
    assert 4 <= task.num_statements <= 64
    assert task.steps >= task.num_statements // 2


def test_a_tiny_training_learns_and_writes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = (
        Stage("copy", (48,), 2),
        Stage("answers", (64,), 12, statements=(4, 4), stack=True, supervision=1.0),
    )
    monkeypatch.setattr(train.Trainer, "stages", stages)
    monkeypatch.setattr(train, "LENGTHS", (64,))
    monkeypatch.setattr("training.long_answers.curriculum.row_batch", few(4))
    losses: list[float] = []
    step_loss = train.step_loss

    def watched(*given: Any) -> Any:
        loss, accuracy = step_loss(*given)
        losses.append(loss.item())
        return loss, accuracy

    monkeypatch.setattr(train, "step_loss", watched)
    threads = torch.get_num_threads()
    train.main(["--out", str(tmp_path), "--count", "1"])
    torch.set_num_threads(threads)
    assert len(losses) == 14
    assert losses[-1] < losses[2]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(KINDS)
    assert said[0].startswith("64 tokens, loop: exact match 0.000, steps ")
    weights = {file.name for file in (tmp_path / "weights").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= weights
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    assert config["num_hidden_layers"] == load_model().config.num_hidden_layers


def few(count: int) -> Any:
    """The batch of a step's first rows alone."""
    from training.long_answers.batches import row_batch

    return lambda rng, rows: row_batch(rng, rows[:count])
