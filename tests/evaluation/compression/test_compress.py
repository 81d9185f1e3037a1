"""A prompt made shorter: exactly its own pieces, in order, and nothing protected left out."""

import json
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvpolicy.evaluation import (
    CompressedPrompt,
    FilterLayerScorer,
    LookAheadScorer,
    PromptSaliency,
    PromptScorer,
    compress_prompt,
)
from kvpolicy.evaluation.compression.report import preview
from kvpolicy.evaluation.tasks.ruler_words import load_model, load_tokenizer, prompts
from tests.evaluation.compression.tokenizers import SlowTokenizer, byte_tokenizer
from tests.reference import tiny_model

BYTES, BARE = byte_tokenizer(), byte_tokenizer(template=None)
STAND_IN: Any = None  # for the model, where the saliency is given
STORY = (
    "the river asked the horse.\nThe garden 王 slept 😀 in the mountain window.\n\n12345 foxes.\n"
)


@attrs.frozen
class Given(PromptScorer):
    """A saliency that is told; tokens beyond it have none."""

    values: tuple[float, ...] = ()

    def score(self, model: PreTrainedModel, input_ids: Any) -> PromptSaliency:
        values = torch.zeros(len(input_ids))
        values[: len(self.values)] = torch.tensor(self.values)[: len(values)]
        return PromptSaliency(values, "what is given")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(BYTES), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def pieces_in_order(found: CompressedPrompt) -> bool:
    """Whether what is left is pieces of the prompt, each where the spans say, in order."""
    at = 0
    for each in found.segments:
        assert each.characters is not None
        first, last = each.characters
        assert (first, found.prompt[first:last]) == (at, each.text)
        at = last
    return at == len(found.prompt) and found.text == "".join(each.text for each in found.kept)


@given(
    text=st.lists(
        st.sampled_from(["the river ", "horse.\n", "王王", "😀", "  \n", "12345"]), min_size=3
    ),
    values=st.lists(st.floats(0, 1, width=16), max_size=60),
    rate=st.sampled_from([0.05, 0.3, 0.8, 1.0]),
    size=st.integers(1, 9),
    align=st.sampled_from(["line", "word", "token"]),
)
def test_what_is_left_is_pieces_in_order(
    text: list[str], values: list[float], rate: float, size: int, align: str
) -> None:
    prompt = "".join(text)
    if not prompt.strip():
        return
    found = compress_prompt(
        STAND_IN,
        BARE,
        prompt,
        rate=rate,
        scorer=Given(tuple(values)),
        chunk_size=size,
        align=align,
    )
    assert found.prompt == prompt
    assert pieces_in_order(found)
    kept = [i for each in found.kept for i in range(each.start, each.end)]
    whole = BARE(prompt).input_ids
    assert found.ids == tuple(whole[i] for i in kept)
    assert (found.tokens_before, found.tokens_after) == (len(whole), len(kept))
    assert prompt.startswith(found.kept[0].text)
    assert prompt.endswith(found.kept[-1].text)
    if rate == 1.0:
        assert found.text == prompt
    if align != "token":
        for one, other in zip(found.kept, found.kept[1:], strict=False):
            joined = one.text[-1:] + other.text[:1]
            between = prompt[one.characters[1] : other.characters[0]]  # type: ignore[index]
            # Words are joined only where nothing but the end of a long one came in between.
            if joined.strip() == joined and any(each.isspace() for each in between):
                assert not between[0].isspace()
    again = compress_prompt(
        STAND_IN,
        BARE,
        prompt,
        rate=rate,
        scorer=Given(tuple(values)),
        chunk_size=size,
        align=align,
    )
    assert again == found


def test_by_hand() -> None:
    """The bundled tokenizer knows none of these words, but has a token for each."""
    prompt = "zero one two three four five six seven eight nine"
    values = (0.0, 0.0, 5.0, 4.0, 1.0, 1.0, 6.0, 0.0, 0.0, 0.0)
    found = compress_prompt(
        STAND_IN, load_tokenizer(), prompt, rate=0.6, scorer=Given(values), chunk_size=2
    )
    assert found.text == "zero one two three eight nine"
    assert [each.text for each in found.left_out] == ["four five six seven "]
    assert [(each.score, each.kept, each.always) for each in found.chunks] == [
        (0.0, True, True), (4.5, True, False), (1.0, False, False), (3.0, False, False),
        (0.0, True, True),
    ]  # fmt: skip


def test_words_are_not_glued() -> None:
    """What is left out begins and ends with white space: some stays where words would meet."""
    single = byte_tokenizer(None, vocab_size=259)
    settings: dict[str, Any] = {"rate": 0.1, "scorer": Given(), "chunk_size": 3}
    found = compress_prompt(STAND_IN, single, "aaa b\nccc", **settings)
    assert found.text == "aaa ccc"
    assert [each.text for each in found.segments] == ["aaa ", "b\n", "ccc"]
    assert single.decode(found.ids) == "<|begin|>aaaccc"
    assert compress_prompt(STAND_IN, single, "aaa b\nccc", gap="~", **settings).text == "aaa~ccc"
    assert compress_prompt(STAND_IN, single, "aa.\nb\nccc", **settings).text == "aa.\nccc"


def test_never_cut() -> None:
    start = STORY.index("garden")
    settings: dict[str, Any] = {"rate": 0.01, "chunk_size": 3, "scorer": Given()}
    without = compress_prompt(STAND_IN, BARE, STORY, **settings)
    assert "garden" not in without.text
    assert "😀" not in without.text
    spans = [(start, start + 6), (STORY.index("😀"), STORY.index("😀") + 1)]
    found = compress_prompt(STAND_IN, BARE, STORY, protect=spans, **settings)
    assert "garden" in found.text
    assert "😀" in found.text
    assert pieces_in_order(found)
    named = compress_prompt(STAND_IN, BARE, STORY, keep=["garden", "😀"], **settings)
    assert named == found
    templated = compress_prompt(
        STAND_IN, BYTES, "\n " + STORY, protect=[(a + 2, b + 2) for a, b in spans], **settings
    )
    assert "garden" in templated.text
    assert "😀" in templated.text
    assert templated.messages == ({"role": "user", "content": templated.text},)
    assert "<|start|>" not in templated.text
    assert BYTES.decode(templated.ids).startswith("<|start|>user\nthe")


def test_a_chat(model: PreTrainedModel) -> None:
    system = {"role": "system", "content": "the system asked the user for the lazy dog " * 2}
    story = {"role": "user", "content": STORY * 4, "keep": "12345 foxes.", "name": "fox"}
    question = {"role": "user", "content": "Where did the garden sleep? " * 3, "keep": True}
    found = compress_prompt(
        model, BYTES, [system, story, question], rate=0.2, chunk_size=8, gap=" [...] "
    )
    assert [each["role"] for each in found.messages] == ["system", "user", "user"]
    assert found.messages[0] == system | {"content": system["content"].strip()}
    assert found.messages[2]["content"] == question["content"].strip()  # type: ignore[union-attr]
    assert found.messages[1].keys() == {"role", "content", "name"}
    content = found.messages[1]["content"]
    assert content.count("12345 foxes.") == 4
    assert len(content) < len(STORY) * 2
    pieces, at = content.split(" [...] "), 0
    assert len(pieces) > 2
    for piece in pieces:
        at = (STORY * 4).index(piece, at) + len(piece)
    rendered = BYTES.apply_chat_template(
        list(found.messages), tokenize=False, add_generation_prompt=True
    )
    assert found.text == rendered
    assert BYTES.decode(found.ids) == rendered
    assert "keep" not in json.dumps(found.request("served"))


def test_budget_in_tokens(model: PreTrainedModel) -> None:
    found = compress_prompt(model, BARE, STORY * 4, tokens=60, chunk_size=8, keep=["12345"])
    assert 40 < found.tokens_after <= 60
    with pytest.raises(ValueError, match="tokens must be at least"):
        compress_prompt(model, BARE, STORY * 4, tokens=8, chunk_size=8, keep=["12345"])


def test_a_short_prompt_stays_whole(model: PreTrainedModel) -> None:
    for prompt in ("fox", STORY[:20]):
        found = compress_prompt(model, BARE, prompt, rate=0.01)
        assert (found.text, found.left_out) == (prompt, ())


def test_a_tokenizer_without_offsets() -> None:
    prompt = " ".join(f"w{i}" for i in range(40))
    model, slow = tiny_model("llama", seed=3), SlowTokenizer()
    found = compress_prompt(model, slow, prompt, rate=0.5, chunk_size=5, gap=" ... ")
    pieces, words = found.text.split(" ... "), prompt.split()
    assert len(pieces) > 1
    kept = [word for piece in pieces for word in piece.split()]
    assert kept == [
        words[i - 1] for each in found.kept for i in range(max(each.start, 1), each.end)
    ]
    assert all(each.characters is None for each in found.segments)
    assert "left out" in found.report()


def test_the_asked_words_stay() -> None:
    """On the bundled model's own questions: the statement that answers is among what is kept."""
    chooser, tokenizer = load_model(), load_tokenizer()
    scorer = LookAheadScorer(kernel_size=5)
    kept = 0
    for prompt in prompts("multi-key", length=512, count=8, seed=3):
        found = compress_prompt(
            chooser, tokenizer, prompt.input, rate=0.2, scorer=scorer, chunk_size=16
        )
        assert found.text.endswith(prompt.question)
        assert 0.15 < found.tokens_after / found.tokens_before < 0.3
        answer = prompt.answer.removesuffix(" <end>")
        kept += answer in found.text
    assert kept >= 6


@pytest.mark.parametrize("count", [3, 400])
def test_the_report_fits(count: int) -> None:
    prompt = "王" * 60 + STORY * count
    found = compress_prompt(
        STAND_IN,
        BARE,
        prompt,
        rate=0.3,
        chunk_size=8,
        scorer=Given((0.5, 1e-9) * 90),
    )
    lines = found.report().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line[:2] in ("+ ", "- ") and "kept," not in line]
    assert len(rows) == min(len(found.segments), 40)
    assert lines[0].startswith(f"{found.tokens_before:,} tokens -> {found.tokens_after:,} ")
    assert ("more ..." in found.report()) == (len(found.segments) > 40)


def test_previews() -> None:
    assert preview("a  b\n\tc\x00d", 20) == "a b c d"
    assert preview("王" * 10, 20) == "王" * 10
    assert preview("王" * 11, 20) == "王" * 5 + "..." + "王" * 3


def test_requests_and_data(model: PreTrainedModel) -> None:
    found = compress_prompt(model, BARE, STORY * 3, rate=0.3, chunk_size=8)
    assert found.request("m", max_tokens=5) == {
        "max_tokens": 5,
        "model": "m",
        "messages": [{"role": "user", "content": found.text}],
    }
    assert found.request("m", as_ids=True) == {"model": "m", "prompt": list(found.ids)}
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert data["text"] == found.text
    assert [each["text"] for each in data["segments"]] == [each.text for each in found.segments]
    assert [each["score"] for each in data["chunks"]] == [each.score for each in found.chunks]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rate": 0}, ValueError, r"rate must be in \(0, 1\], got 0"),
    ({"rate": 1.5}, ValueError, r"rate must be in \(0, 1\], got 1.5"),
    ({"rate": 0.2, "tokens": 9}, ValueError, "at most one of rate and tokens"),
    ({"tokens": 0}, ValueError, "tokens must be at least 1"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    ({"align": "page"}, ValueError, "align must be one of line, word, token, got 'page'"),
    ({"gap": 3}, TypeError, "gap must be a str"),
    ({"scorer": LookAheadScorer}, TypeError, "scorer must be a PromptScorer"),
    ({"prompt": " \n"}, ValueError, "prompt must have text"),
    ({"prompt": 7}, TypeError, "prompt must be a text or a list of messages"),
    ({"prompt": []}, ValueError, "at least one message with content"),
    ({"keep": "river"}, TypeError, "keep must be a list of texts"),
    ({"keep": ["lake"]}, ValueError, "each of keep must be in the prompt, got 'lake'"),
    ({"protect": [(5, 5)]}, ValueError, "each of protect must be"),
    ({"protect": [(0, 10**6)]}, ValueError, "each of protect must be"),
    ({"protect": [3]}, TypeError, "each of protect must be two ints"),
    ({"chat": True}, ValueError, "chat needs a tokenizer with a chat template"),
    ({"prompt": [{"role": "user", "content": "x"}], "chat": False}, ValueError, "chat must not be"),
    ({"prompt": [{"role": "user", "content": "x"}], "protect": [(0, 1)]}, ValueError, "protect"),
    ({"scorer": FilterLayerScorer(filter_layer=2)}, ValueError, r"filter_layer must be in \[0, 1"),
]


@pytest.mark.parametrize(("change", "error", "said"), BAD)
def test_bad_input(
    model: PreTrainedModel, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    settings = {"prompt": STORY, **change}
    with pytest.raises(error, match=said):
        compress_prompt(model, BARE, **settings)
