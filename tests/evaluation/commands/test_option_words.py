"""One word for one idea over all commands."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from kvpolicy.evaluation.commands.app import COMMANDS
from kvpolicy.evaluation.commands.options import _fields
from kvpolicy.evaluation.options import Option


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
