"""One word for one idea over all commands; the earlier version's words are understood."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.commands.app import COMMANDS
from kvpolicy.evaluation.commands.options import _fields, in_new_words
from kvpolicy.evaluation.options import Option
from kvpolicy.renamed import EarlierWordWarning

EARLIER = {
    "analyze": {"--pool": "--kernel-size", "--window": "--window-size"},
    "calibrate": {"--prompts": "--prompts-file"},
    "compare": {"--new-tokens": "--answer-tokens", "--prompts": "--prompts-file"},
    "compress": {"--chunk": "--chunk-size", "--out": "--out-file", "--pool": "--kernel-size"},
    "estimate": {"--answer": "--answer-tokens", "--prefill-chunk": "--prefill-chunk-size"},
    "eval": {"--chat-template": "--chat"},
    "generate": {"--max-new-tokens": "--answer-tokens"},
    "report": {"--out": "--out-file"},
}


def options_of(kind: type[Any]) -> Iterator[tuple[tuple[str, ...], Option]]:
    for name, _, hint, option in _fields(kind):
        if option is None:
            yield from options_of(hint)
        elif not option.positional:
            yield option.names or (f"--{name.replace('_', '-')}",), option


def options_class(command: Callable[..., None]) -> type[Any] | None:
    kinds = [hint for name, hint in get_type_hints(command).items() if name != "return"]
    return kinds[0] if kinds else None


WORDS = {
    command.__name__: list(options_of(kind))
    for command in COMMANDS
    if (kind := options_class(command)) is not None
}


def test_a_word_means_one_kind_of_thing() -> None:
    """Such as a folder: what is written to a file is said by another word."""
    found = defaultdict(set)
    for options in WORDS.values():
        for names, option in options:
            for name in names:
                found[name].add(option.metavar)
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    assert found["--out"] == {"DIR"}
    assert found["--out-file"] == found["--prompts-file"] == found["--prompt-file"] == {"FILE"}


def test_a_word_has_the_same_other_forms_everywhere() -> None:
    forms = defaultdict(set)
    for options in WORDS.values():
        for names, _ in options:
            forms[names[0]].add(names)
    assert {name: each for name, each in forms.items() if len(each) > 1} == {}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.__name__)
def test_earlier_options_are_understood(command: Callable[..., None]) -> None:
    renamed = EARLIER.get(command.__name__, {})
    options = WORDS.get(command.__name__, [])
    assert {option.earlier for _, option in options} - {None} == set(renamed)
    known = {part for names, _ in options for name in names for part in name.split("/")}
    for old, new in renamed.items():
        assert old not in known
        assert new in known
        with pytest.warns(EarlierWordWarning, match=f"^{old} is deprecated, use {new}$"):
            assert in_new_words(command, ["-p", old, "x", "--", old]) == ["-p", new, "x", "--", old]
        with pytest.warns(EarlierWordWarning, match="is deprecated"):
            assert in_new_words(command, [f"{old}=a=b"]) == [f"{new}=a=b"]
    assert in_new_words(command, ["-r", "0.1", *known]) == ["-r", "0.1", *known]


def test_a_command_line_of_the_earlier_version(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["estimate", "--config", "llama-3.1-8b", "--context", "1024", "--memory", "80GB"]
    now = ["--answer-tokens", "99", "--prefill-chunk-size", "512", "-p", "adakv,gemfilter"]
    earlier = ["--answer", "99", "--prefill-chunk", "512", "-p", "ada_kv,gem-filter"]
    assert main([*shape, *now]) == 0
    expected = capsys.readouterr()
    assert "warning" not in expected.err
    assert main([*shape, *earlier]) == 0
    found = capsys.readouterr()
    assert found.out == expected.out
    assert [line for line in found.err.splitlines() if line.startswith("warning: ")] == [
        "warning: --answer is deprecated, use --answer-tokens",
        "warning: --prefill-chunk is deprecated, use --prefill-chunk-size",
        "warning: the name ada_kv is deprecated, use adakv",
        "warning: the name gem-filter is deprecated, use gemfilter",
    ]
