"""One word for one idea over all commands."""

from collections import defaultdict

import typer

from kvpolicy.evaluation.commands.app import app

OPTIONS = [
    option
    for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    for option in command.params
    if option.param_type_name == "option" and option.name != "help"
]


def test_a_word_means_one_kind_of_thing() -> None:
    """Such as a folder: what is written to a file is said by another word."""
    found = defaultdict(set)
    for option in OPTIONS:
        for name in option.opts:
            found[name].add(option.metavar)
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    assert found["--out"] == {"DIR"}
    assert found["--prompt-file"] == found["--json"] == {"FILE"}


def test_a_word_has_the_same_other_forms_everywhere() -> None:
    forms = defaultdict(set)
    for option in OPTIONS:
        forms[option.opts[0]].add((*option.opts, *option.secondary_opts))
    assert {name: each for name, each in forms.items() if len(each) > 1} == {}
