import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.commands.check import refusal
from kvpolicy.integrations.transformers.checking import ModelCheck
from kvpolicy.integrations.transformers.model.check import Finding, ModelQuirks, Verdict
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.registry import registered
from tests.integrations.model.builds.catalogue import builds
from tests.needle import load_tokenizer


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command's exit status and what it prints of a tiny model."""

    def check(name: str, *more: str) -> tuple[int, str]:
        builds()[name].model().save_pretrained(tmp_path)
        load_tokenizer().save_pretrained(tmp_path)
        return main(["check", str(tmp_path), *more]), capsys.readouterr().out

    return check


def rows_of(out: str) -> dict[str, str]:
    """What can be applied, by policy: "yes", or "no: " and the reason."""
    text = " ".join(out.split())
    if found := re.search(r"All (\d+) policies can be applied", text):
        assert int(found[1]) == len(registered("policy"))
        return dict.fromkeys(registered("policy"), "yes")
    can = re.search(r"policies can be applied at [\d,]+ tokens: ([\w, ]+)\.", text)
    rows = dict.fromkeys(can[1].split(", ") if can else [], "yes")
    for names, reason in re.findall(r"Not ([a-z_0-9, ]+): (.*?)(?=Not [a-z_0-9, ]+: |$)", text):
        rows |= {name: f"no: {reason.strip()}" for name in names.split(", ")}
    return rows


def test_the_default_model_works_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM (llama)" in out
    assert "6 layers of full attention" in out
    assert {each.strip() for each in rows_of(out).values()} == {"yes"}
    assert set(rows_of(out)) == set(registered("policy"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "more", "status", "said", "policy", "found"),
    [
        ("llava", (), 0, "LlavaForConditionalGeneration", "fastkv", "yes"),
        # At a length that windows do not see, what drops after one is refused, with the reason.
        ("gemma2", ("--context", "40"), 0, "layers of sliding window", "fastkv", "yes"),
        (
            "gemma2",
            ("--context", "40"),
            0,
            "layers of sliding window",
            "gemfilter",
            "no: context must fit the sliding",
        ),
        ("bloom", (), 1, "BloomForCausalLM (bloom)", "snapkv", "no: attention scores must"),
    ],
)
def test_what_can_be_applied(
    shown: Any, name: str, more: Any, status: int, said: str, policy: str, found: str
) -> None:
    done, out = shown(name, *more)
    assert done == status
    assert said in out
    assert rows_of(out)[policy].strip().startswith(found)
    if status:
        assert all(each.startswith(found) for each in rows_of(out).values())


def test_attention_that_shows_no_queries(shown: Any) -> None:
    """Reasons name classes in sentences."""
    status, out = shown("falcon")
    joined = " ".join(out.split())
    assert status == 0
    assert "it cannot be applied to FalconForCausalLM, whose attention" in joined
    assert not re.search(r"\w\(", joined)
    assert "attention shows no queries: policies that read queries cannot be applied" in out
    work = {name for name, each in rows_of(out).items() if each.strip() == "yes"}
    assert work == {
        *("full_context", "streamingllm", "key_norm", "keydiff", "nestedkv", "lagkv", "curdkv"),
        "random",
    }


def checked(name: str, finding: Finding | None = None, **quirks: bool) -> ModelCheck:
    """What is found of a tiny model, as if its self-check had found this."""
    model = builds()[name].model()
    try:
        parts = ModelParts(model)
    except UnsupportedModelError as error:
        return ModelCheck(type(model).__name__, name, (), str(error), None, None)
    verdict = Verdict(False, Finding(), finding or Finding(), ModelQuirks(**quirks))
    return ModelCheck(type(model).__name__, name, (), None, verdict, parts)


# A model for each kind of reason, and what it says of one policy at a context of 4,096 tokens.
SAID = {
    "afmoe": (
        "gemfilter",
        "context must fit the sliding window of every layer if gemfilter restarts the prefill "
        "at new positions, 16 tokens, got 4096",
    ),
    "ministral": (
        "lazyllm",
        "layers after which lazyllm drops tokens must see the whole context, but the sliding "
        "window of layers 0, 1, 2 sees 16 of 4096 tokens; layers that see all: none",
    ),
    "longcat_flash": (
        "sliminfer",
        "sliminfer cannot be applied to LongcatFlashForCausalLM, whose layers attend several "
        "times each: no token can be dropped in between; use a policy that drops no tokens",
    ),
    "nemotron_h": ("pyramidinfer", "layers after which pyramidinfer drops tokens must attend"),
    "hy_v4": ("pyramidinfer", "must not pick slots by an indexer for a later layer"),
    "gemma3n_text": ("sliminfer", "stages must each drop after a layer of its own"),
    "xglm": (
        "fastkv",
        "fastkv cannot be applied to XGLMForCausalLM, whose attention does not go through "
        "Transformers' AttentionInterface and shows no queries: it reads queries; use a policy "
        "that does not, such as StreamingLLM, KeyNorm or KeyDiff",
    ),
    "bloom": ("snapkv", "attention scores must not depend on the columns of keys"),
    "big_bird": ("snapkv", "a layer with an attention function of its own must see the whole"),
    "deepseek_v4": ("snapkv", "holds compressed tokens, several to an entry"),
    "falcon_mamba": ("snapkv", "some layer must hold keys and values, but all of them hold a"),
    "hrm_text": ("snapkv", "model must run each of its layers once for a token"),
    "openai-gpt": ("snapkv", "model must take a cache of Transformers"),
    "recurrent_gemma": ("snapkv", "every recurrent layer must hold its state in the cache"),
    "unlimited_ocr": ("snapkv", "every layer must see the tokens of an answer as it sees those"),
}


@pytest.mark.parametrize("name", SAID)
def test_every_reason_is_a_sentence(name: str) -> None:
    """Whole, and with the names that are in the table, not what Python writes of objects."""
    found = checked(name)
    reasons = {each: refusal(found, each, 4096) for each in registered("policy")}
    policy, said = SAID[name]
    assert said in str(reasons[policy])
    written = [each for each in reasons.values() if each is not None]
    assert written
    for each in written:
        assert not re.search(r"\w\(|\w=|\[\d|\[\.\.\.\]|<", each), each


def test_reasons_are_of_the_policy_and_not_of_the_self_checks(shown: Any) -> None:
    status, out = shown("ministral", "--context", "4096")
    assert status == 0
    reasons = {name: each for name, each in rows_of(out).items() if each.startswith("no:")}
    assert {"fastkv", "claa", "lazyllm"} <= set(reasons)
    joined = " ".join(out.split())
    assert ": layers after which it drops tokens must see the whole context" in joined
    assert "sees 16 of 4096 tokens" in joined
    assert "Propagation" not in out
    assert "cannot be applied to this model" not in joined


def test_what_the_self_check_finds_is_a_sentence() -> None:
    wrong = Finding(0.5, 1.0, "its self-check found wrong logits under a policy that drops tokens")
    found = checked("llama", wrong)
    assert refusal(found, "snapkv", 4096) is None
    assert refusal(found, "fastkv", 4096) == (
        "fastkv cannot be applied to this model: its self-check found wrong logits under a policy "
        "that drops tokens"
    )
    columns = refusal(checked("llama", pads=False), "gemfilter", 4096)
    assert str(columns).startswith("gemfilter cannot be applied to this model: it restarts the")


def test_a_policy_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def needing(name: str) -> None:
        raise TypeError("Own.__init__() missing 1 required argument: 'size'")

    monkeypatch.setattr("kvpolicy.registry.build", needing)
    said = "Own.__init__() missing 1 required argument: 'size'"
    assert refusal(checked("llama"), "own", 4096) == said
