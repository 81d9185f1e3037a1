"""The code blocks of the how-to pages run, each page from its first block to its last.

Tiny models of the same classes are in the place of the models on the Hub.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from kvpolicy.integrations.transformers import Conversation, PolicyCache
from tests.integrations.conversations.support import SPECIAL, chat_model, chatter
from tests.integrations.conversations.test_images import Processor
from tests.integrations.vision.models import FAMILIES
from tests.integrations.vision.rows import model_of
from tests.pages import PYTHON, text_of

HUB = re.compile(r'"Qwen/[\w.-]+"')
REPORT = "The user asked the system for the quick brown fox and the lazy dog. " * 6


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the place of a model on the Hub."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = chatter()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    model = chat_model("llama")
    end = tokenizer.eos_token_id
    model.generation_config.update(eos_token_id=end, pad_token_id=end, suppress_tokens=[*SPECIAL])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the blocks read."""
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(REPORT)
    Image.new("L", (4, 6), 1).save("chart.png")
    return tmp_path


def blocks_of(page: str) -> list[str]:
    """The blocks of a page, with answers of a few tokens and chunks of some."""
    text = re.sub(r"max_new_tokens=\d+", "max_new_tokens=4", text_of(f"docs/{page}"))
    return [
        each.replace("2048, dim=1", "40, dim=1").replace("size=2048", "size=40")
        for each in PYTHON.findall(text)
    ]


def run(page: str, hub: Path | None = None) -> dict[str, Any]:
    """Run the blocks of a page, one after the other; return the names that they leave."""
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        exec(block if hub is None else HUB.sub(repr(str(hub)), block), names)
    return names


def test_batches(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("batches.md", hub)
    assert "total" in capsys.readouterr().out
    assert names["output"].shape[0] == 2
    assert names["cache"].get_seq_length() == (
        names["input_ids"].shape[1] + 8 + names["asked"].input_ids.shape[1]
    )
    assert not bool(names["inputs"].attention_mask.all())  # a row is padded


def test_chats(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("chats.md", hub)
    assert re.search(r"^Conversation\(Llama.*\): 1 turn, ", capsys.readouterr().out, re.MULTILINE)
    assert [len(names[each].messages) for each in ("chat", "other")] == [3, 5]
    loaded = Conversation.load("chat.safetensors", names["model"], names["tokenizer"])
    assert len(loaded.messages) == 3
    assert names["output"].shape[1] > names["inputs"].input_ids.shape[1] + 8


def test_pipelines(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("pipelines.md", hub)
    assert capsys.readouterr().out.splitlines()[-1].startswith("total")
    assert names["applied"].reports[-1].total.share < 0.5
    assert names["cache"].propagated


def test_memory(hub: Path, tmp_path: Path) -> None:
    names = run("memory.md", hub)
    assert (tmp_path / "report.safetensors").is_file()
    assert names["cache"].get_seq_length() == names["inputs"].input_ids.shape[1] > 80
    assert names["cache"].report().total.share < 0.5


def test_analysis_and_calibration(hub: Path) -> None:
    names = run("analysis.md", hub)
    layers = len(names["attention"])
    assert [len(held) for held in names["recall"].values()] == [layers] * 2
    assert names["overlap"].layers == tuple(range(layers))
    assert names["distances"].layers == tuple(range(layers // 2))
    assert run("calibration.md", hub)["policy"].propagation.tsp_layer in names["distances"].layers


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_pages_without_a_model_of_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    """What they print or leave is what they say."""
    assert run("decoding.md")["cache"].policy.decoding.most_tokens == 4096
    capsys.readouterr()
    run("estimate.md")
    (said,) = re.findall(r"^print.*\)  # (.*)$", "".join(blocks_of("estimate.md")), re.MULTILINE)
    assert capsys.readouterr().out.strip() == said


def test_kvpress(hub: Path) -> None:
    """The half of the page's script that is for kvpolicy."""
    model = AutoModelForCausalLM.from_pretrained(hub)
    names: dict[str, Any] = {"model": model, "inputs": {"input_ids": torch.arange(99)[None] % 7}}
    exec(blocks_of("kvpress.md")[0], names)
    assert names["cache"].report().total.share < 0.2


def test_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    family = "qwen3_vl"
    made = {
        AutoModelForImageTextToText: model_of(family),
        AutoProcessor: Processor(FAMILIES[family]),
    }
    for kind, one in made.items():
        monkeypatch.setattr(kind, "from_pretrained", lambda name, one=one: one)
    names = run("images.md")
    assert "total" in capsys.readouterr().out
    assert isinstance(names["cache"], PolicyCache)
    assert torch.equal(
        names["output"][:, : names["inputs"]["input_ids"].shape[1]], names["inputs"]["input_ids"]
    )
    assert names["chat"].rereadings == 0
