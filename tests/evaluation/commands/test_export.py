"""`kvpolicy export` and `kvpolicy serve-check`: documents for vLLM, and which of them fit."""

from pathlib import Path

import pytest

from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.commands.serve_check import parse_size
from kvpolicy.integrations.vllm import ServedDocument
from tests.needle import load_model, load_tokenizer
from tests.reference import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    load_model().save_pretrained(folder / "model")
    load_tokenizer().save_pretrained(folder / "model")
    names = sorted(load_tokenizer().get_vocab())
    (folder / "report.txt").write_text(" ".join(names[at % len(names)] for at in range(5, 105)))
    return folder


def export(folder: Path, *given: str) -> int:
    paths = ("--model", str(folder / "model"), "--prompt-file", str(folder / "report.txt"))
    return main(["export", *paths, *given])


def test_export_then_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = folder / "documents" / "report.safetensors"
    assert export(folder, "--policy", "snapkv", "--rate", "0.4", "--to", str(to)) == 0
    shown = capsys.readouterr().out
    document = ServedDocument.load(to)
    assert f"report: {document.length} of {document.read_len} tokens held under SnapKV" in shown
    assert document.length == int(0.4 * document.read_len)
    model = load_model()
    document.check(model.config, dtype="float32", checkpoint=folder / "model")
    checked = ["serve-check", str(to.parent), "--model", str(folder / "model")]
    assert main([*checked, "--memory", "1MiB", "--answer", "20", "--block", "8"]) == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.split()[:1] == ["report"])
    blocks = -(-(document.length + 20) // 8) * 8 * document.token_bytes
    full = -(-(document.read_len + 20) // 8) * 8 * document.token_bytes
    assert row[1:3] == [str(document.read_len), str(document.length)]
    assert row[4:] == [str(2**20 // blocks), str(2**20 // full)]
    assert 2**20 // blocks > 2**20 // full > 0


@pytest.mark.parametrize(
    ("given", "policy"),
    [((), "ReplayKV("), (("--policy", "kvzip", "--rate", "0.2"), "KVzip(")],
    ids=["default", "kvzip"],
)
def test_all_heads_keep_equally_many(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, ...],
    policy: str,
) -> None:
    """Policies with one threshold for all heads give each head its own budget for vLLM."""
    to = tmp_path / "report.safetensors"
    assert export(folder, *given, "--to", str(to)) == 0
    shown = capsys.readouterr().out
    assert f"held under {policy}" in shown
    assert "head_uniform=True" in shown
    document = ServedDocument.load(to)
    assert document.length == int(0.2 * document.read_len)


def test_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = folder / "others" / "one.safetensors"
    assert export(folder, "--policy", "streamingllm", "--to", str(to)) == 0
    (to.parent / "two.safetensors").write_bytes(to.read_bytes()[:500])
    (to.parent / "a report.safetensors").write_bytes(to.read_bytes())
    tiny_model("llama", seed=1).save_pretrained(folder / "tiny")
    capsys.readouterr()
    assert main(["serve-check", str(to.parent), "--model", str(folder / "tiny")]) == 1
    shown = capsys.readouterr().out
    assert "not served: document 'one' does not fit the served model" in shown
    assert "not served: two.safetensors is not a whole safetensors file" in shown
    assert "not served: a document's name must be letters, digits, _, - and ., got 'a report'" in (
        " ".join(shown.split())
    )


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(folder, "--to", str(tmp_path / "a.bin")) == 1
    assert "path must be NAME.safetensors" in capsys.readouterr().err
    to = tmp_path / "a.safetensors"
    assert export(folder, "--policy", "adakv", "--to", str(to)) == 1
    assert "equally many tokens in every head" in capsys.readouterr().err
    assert export(folder, "--chat", "--to", str(to)) == 1
    assert "--chat needs a chat template" in capsys.readouterr().err
    assert not to.exists()
    missing = ["serve-check", str(tmp_path / "none"), "--model", str(folder / "model")]
    assert main(missing) == 1
    assert "documents must be a folder that exists" in capsys.readouterr().err
    assert main(["serve-check", str(tmp_path), "--model", str(folder / "model")]) == 0
    assert "has no documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        (" 24 GiB ", 24 * 2**30),
        ("40e9", 40 * 10**9),
        ("1.5kB", 1500),
        ("2TiB", 2 * 2**40),
        ("512", 512),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "80 gigs", "-1GB", "0", "1e999", "1.2.3GB", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="--memory must be a number of bytes such as 80GB, 24GiB"):
        parse_size(text, "--memory")
