"""What `kvpolicy generate` says of layers: what they read of a prompt, what they hold of it."""

from collections.abc import Callable

import pytest

from kvpolicy.evaluation.cli import main

PROMPT = " ".join(["f1 f2 f3 f4 f5"] * 20)  # 100 tokens
Lines = Callable[..., list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    def said(*arguments: str) -> list[str]:
        assert main(["generate", "--prompt", PROMPT, "--no-chat", *arguments]) == 0
        return capsys.readouterr().err.splitlines()

    return said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("snapkv", "read: 100 tokens by every layer"),
        (
            "fastkv --set tsp_layer=2 --set tsp_rate=0.2",
            "read: 100 tokens by layers 0 to 2, 20 tokens by layers 3 to 5",
        ),
        (
            "fastkv --set tsp_layer=4 --set tsp_rate=0.3",
            "read: 100 tokens by layers 0 to 4, 30 tokens by layer 5",
        ),
        ("fastkv --set tsp_layer=5 --set tsp_rate=0.3", "read: 100 tokens by every layer"),
        (
            "gemfilter --rate 0.2 --set filter_layer=3",
            "read: 100 tokens by layers 0 to 3, then the 20 that layer 3 chose by all layers",
        ),
        # By hand: 79 tokens before the last 21, and of these int(79 * 0.98), int(77 * 0.925), ...
        (
            "pyramidinfer",
            "read: 100 tokens by layers 0 to 1, 98 tokens by layer 2, 92 tokens by layers 3 to 5",
        ),
        (
            "pyramidinfer --set min_context=1",
            "read: 100 tokens by layer 0, fewer by later ones, 67 by layer 5",
        ),
    ],
)
def test_what_layers_read(lines: Lines, policy: str, said: str) -> None:
    assert said in lines("--answer-tokens", "1", "-p", *policy.split())


def test_what_layers_hold_of_prompt_and_answer(lines: Lines) -> None:
    """The last answer token is not read; a bounded answer evicts tokens of the prompt."""
    start = "held, mean over layers: "
    asked = ("-p", "streamingllm", "--rate", "0.2")
    (whole,) = [each for each in lines(*asked, "--answer-tokens", "6") if each.startswith(start)]
    assert whole == f"{start}20.0 tokens of the prompt, 5.0 of the 5 answer tokens read"
    bound = ("--decoding-tokens", "8", "--decoding-every", "5", "--answer-tokens", "6")
    (bounded,) = [each for each in lines(*asked, *bound) if each.startswith(start)]
    assert bounded == f"{start}4.0 tokens of the prompt, 4.0 of the 5 answer tokens read"
    assert not any(start in each for each in lines(*asked, "--answer-tokens", "1"))
