"""Options that several commands have: read alike, refused alike, and never ignored."""

import io
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from kvpolicy import CachePolicy, DecodingEviction
from kvpolicy.assignments import PartOption
from kvpolicy.evaluation import load
from kvpolicy.evaluation.chosen import chosen_variant, chosen_variants
from kvpolicy.evaluation.commands.app import app
from kvpolicy.evaluation.commands.shared import with_policies
from kvpolicy.evaluation.policy_options import PolicyOptions
from kvpolicy.policies import (
    TOVA,
    FastKV,
    GemFilter,
    GQAGroupSelector,
    LastQueryScorer,
    PassAllPropagation,
    SinkAndRecentSelector,
    SnapKV,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.evaluation.support import NEEDLE, Run
from tests.needle import needle_prompts

ESTIMATE = ("estimate", "--config", "llama-3.1-8b", "--context", 8192)
COMPARE = ("compare", "--count", 2, "--threads", 1)


@pytest.fixture(scope="module")
def text() -> str:
    prompt = needle_prompts(128, count=2, seed=5)[0]
    decoded: str = load(str(NEEDLE)).tokenizer.decode(list(prompt.input_ids))
    return decoded


@pytest.fixture
def prompt_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "needle.txt"
    file.write_text(text)
    return file


def read(*arguments: str) -> PolicyOptions:
    """The options that a command line of policies alone asks for."""
    found = []
    app = typer.Typer()

    @app.command()
    @with_policies
    def command(*, policies: PolicyOptions) -> None:
        found.append(policies)

    app(args=arguments, standalone_mode=False)
    (options,) = found
    return options


def test_options_are_read() -> None:
    options = read(
        *("-p", "snapkv,fastkv", "--policies", "h2o", "-r", "0.1", "-r", "0.2", "--protect", "4"),
        *("--set", "window_size=16", "--set", "tsp_layer=none"),
        *("--scorer", "window-max-pool:window_size=16,kernel_size=5"),
    )
    assert options == PolicyOptions(
        names=("snapkv", "fastkv", "h2o"),
        rates=(0.1, 0.2),
        parameters={"window_size": 16, "tsp_layer": None, "protect": 4},
        parts={"scorer": PartOption("window-max-pool", {"window_size": 16, "kernel_size": 5})},
    )
    assert read() == PolicyOptions()


def test_every_option_reaches_the_policies_that_take_it() -> None:
    options = PolicyOptions(
        names=("fastkv", "full-context", "gemfilter"),
        tokens=(64, 32, 64),
        parameters={"protect": 4, "window_size": 16, "tsp_layer": 3},
    )
    found = {each.label: each.policy for each in chosen_variants(options, [0.1])}
    assert found == {
        "fastkv@3 64 tokens": FastKV(tsp_layer=3, retention_tokens=64, window_size=16, protect=4),
        "fastkv@3 32 tokens": FastKV(tsp_layer=3, retention_tokens=32, window_size=16, protect=4),
        "full_context": found["full_context"],
        "gemfilter 64 tokens": GemFilter(retention_tokens=64, protect=4),
        "gemfilter 32 tokens": GemFilter(retention_tokens=32, protect=4),
    }


def test_a_rate_above_the_tsp_rate_raises_it_alike_for_one_and_for_several() -> None:
    options = PolicyOptions(names=("fastkv",), rates=(0.5, 0.5))
    assert chosen_variant(options, "snapkv").policy == FastKV(tsp_rate=0.5, retention_rate=0.5)
    (one,) = chosen_variants(options, [0.1])
    assert one.policy == FastKV(tsp_rate=0.5, retention_rate=0.5)
    told = PolicyOptions(names=("fastkv",), rates=(0.5,), parameters={"tsp_tokens": 99})
    assert chosen_variant(told, "snapkv").policy == FastKV(tsp_tokens=99, retention_rate=0.5)


@pytest.mark.parametrize(
    ("arguments", "name", "policy"),
    [
        (("--scorer", "window_max_pool"), "window_max_pool_scorer", SnapKV()),
        (
            ("--propagation", "token_selective:tsp_layer=3"),
            "token_selective_propagation:tsp_layer=3",
            FastKV(tsp_layer=3),
        ),
        (
            ("--selector", "sink-and-recent:num_sinks=2", "--protect", "1"),
            "sink_and_recent_selector:num_sinks=2",
            CachePolicy(None, SinkAndRecentSelector(num_sinks=2, protect=1), PassAllPropagation()),
        ),
        (
            (
                *("--scorer", "last_query", "--propagation", "token_selective:tsp_rate=0.4"),
                *("--set", "window_size=1", "--rate", "0.3"),
            ),
            "last_query_scorer+token_selective_propagation:tsp_rate=0.4",
            CachePolicy(
                LastQueryScorer(),
                GQAGroupSelector(0.3, window_size=1),
                TokenSelectivePropagation(tsp_rate=0.4, window_size=1),
            ),
        ),
        (
            ("--scorer", "window_max_pool:window_size=4", "--retention-tokens", "99"),
            "window_max_pool_scorer:window_size=4",
            CachePolicy(
                WindowMaxPoolScorer(4), GQAGroupSelector(retention_tokens=99), PassAllPropagation()
            ),
        ),
    ],
)
def test_compositions(arguments: tuple[str, ...], name: str, policy: CachePolicy) -> None:
    variant = chosen_variant(read(*arguments), "fastkv")
    assert variant.name == name
    parts_of = [(each.scorer, each.selector, each.propagation) for each in (variant.policy, policy)]
    assert parts_of[0] == parts_of[1]


def test_a_composition_stands_beside_policies_at_every_rate() -> None:
    options = read("-p", "snapkv", "-r", "0.1", "-r", "0.2", "--scorer", "last_query")
    assert [each.label for each in chosen_variants(options, ())] == [
        *("snapkv 0.1", "snapkv 0.2", "last_query_scorer 0.1", "last_query_scorer 0.2")
    ]
    own = read("--selector", "gqa_group:retention_rate=0.4")
    assert [each.label for each in chosen_variants(own, (0.1, 0.2))] == [
        "gqa_group_selector:retention_rate=0.4"
    ]
    # A method and its scorer are two rows, however the scorer's name is written.
    alike = read("-p", "keydiff", "--scorer", "KeyDiff", "-r", "0.1")
    labels = [each.label for each in chosen_variants(alike, ())]
    assert labels == ["keydiff 0.1", "keydiff_scorer 0.1"]


@pytest.mark.parametrize("command", [ESTIMATE, COMPARE, ("generate",)])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", 0.1, "--retention-tokens", 9), "at most one of --rate and --retention-tokens"),
        (("--set", "retention_rate=1"), "retention_rate must be given by --rate"),
        (("--set", "retention_tokens=1"), "must be given by --retention-tokens"),
        (("--set", "protect=1"), "must be given by --protect"),
        (("--set", "tsp_layer"), "--set must be NAME=VALUE, a finite number, true, false or none"),
        (("--set", "tsp_layer=inf"), "--set must be NAME=VALUE"),
        (("-p", "full_context", "--rate", 0.1), "--rate must name a parameter of a chosen policy"),
        (("-p", "full_context", "--protect", 1), "--protect must name a parameter of a chosen"),
        (("-p", "full_context", "--retention-tokens", 9), "--retention-tokens must name a"),
        (("-p", "snapkv", "--set", "nope=1"), "--set nope must name a parameter"),
        (("-p", "snapkv", "--retention-tokens", 0), "retention_tokens must be at least 1, got 0"),
        (("-p", "snapkv", "--protect", -1), "protect must be at least 0, got -1"),
        (("-p", "nope"), "no policy is named 'nope'; known: adakv, chunkkv"),
        (("--scorer", "snapkv"), "no scorer is named 'snapkv'; known: accumulated_attention"),
        (("--selector", "keep_all:a=1"), "--selector keep_all takes no a; it takes no parameters"),
        (("--propagation", "staged:x"), "--propagation must be NAME=VALUE"),
        (
            ("--scorer", "window_max_pool:window_size=16"),
            "must be at least 16, the window that WindowMaxPoolScorer(window_size=16) leaves",
        ),
    ],
)
def test_every_command_refuses_alike(
    run: Run,
    prompt_file: Path,
    command: tuple[object, ...],
    arguments: tuple[object, ...],
    said: str,
) -> None:
    if command == ("generate",):
        command = ("generate", "--prompt-file", prompt_file)
    status, out, err = run(*command, *arguments)
    assert (status, out) == (1, "")
    assert re.fullmatch(r"error: .+\n", err)
    assert said in err


def test_generate_keeps_what_it_is_told(run: Run, prompt_file: Path) -> None:
    told = ("--retention-tokens", 40, "--protect", 3, "--set", "window_size=4")
    arguments = ("generate", "--prompt-file", prompt_file, "--answer-tokens", 1)
    status, _, err = run(*arguments, "-p", "snapkv", *told)
    assert status == 0
    assert "SnapKV(window_size=4, retention_tokens=40, protect=3), prompt of 128 tokens" in err
    assert re.search(r"^total +128 +40.0 ", err, flags=re.MULTILINE)
    status, _, err = run(*arguments, "--selector", "sink_and_recent", "--rate", 0.25)
    assert status == 0
    assert re.search(r"^total +128 +32.0 ", err, flags=re.MULTILINE)


def test_generate_reads_standard_input(
    run: Run, prompt_file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_file = run("generate", "--prompt-file", prompt_file, "--answer-tokens", 3)[1]

    def piped(content: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return run("generate", "--prompt-file", "-", "--answer-tokens", 3)

    assert piped(f"{text}\n".encode())[:2] == (0, of_file)
    assert piped(b" \n")[2] == "error: prompt on standard input is empty\n"
    assert "prompt on standard input must be UTF-8 text" in piped(b"\xff")[2]


def test_estimate_says_what_a_composition_is(run: Run) -> None:
    parts = ("--scorer", "last_query", "--propagation", "token_selective:tsp_layer=9")
    status, shown, _ = run(
        *ESTIMATE, *parts, "--retention-tokens", 2048, "--retention-tokens", 1024
    )
    assert status == 0
    said = " ".join(shown.split())
    # The table breaks the name into two lines.
    assert "last_query_scorer+token_selective_propaga 2,048" in said
    assert "last_query_scorer+token_selective_propaga 1,024" in said
    assert "CachePolicy(LastQueryScorer(), GQAGroupSelector(retention_tokens=2048)" in said
    name = "last_query_scorer+token_selective_propagation:tsp_layer=9"
    assert f"{name} drops tokens after layer 9 of 0 to 31." in said


def test_a_bound_of_answers_is_each_policys_own_rule() -> None:
    options = PolicyOptions(
        names=("full_context", "snapkv", "tova"), tokens=(64,), decoding_tokens=48
    )
    full, snapkv, tova = (each.policy for each in chosen_variants(options, (None,)))
    assert full.decoding is None
    assert snapkv == SnapKV(retention_tokens=64, decoding=48)
    assert tova == TOVA(retention_tokens=64, decoding=48)
    options = PolicyOptions(
        parts={"selector": PartOption("sink_and_recent")},
        tokens=(64,),
        decoding_tokens=48,
        decoding_every=9,
    )
    (composed,) = chosen_variants(options, (None,))
    assert composed.policy.decoding == DecodingEviction(
        composed.policy.scorer, SinkAndRecentSelector(retention_tokens=48), every=9
    )


def test_a_bound_that_nothing_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="--decoding-tokens must be given with a policy that has"):
        chosen_variants(PolicyOptions(names=("full_context",), decoding_tokens=48), (None,))
    with pytest.raises(ValueError, match="--decoding-tokens must be given with --decoding-every"):
        PolicyOptions(decoding_every=4)
    with pytest.raises(ValueError, match="decoding must be given by --decoding-tokens"):
        PolicyOptions.given(assignments=["decoding=48"])


def test_a_bound_reaches_budgets_within_selectors_and_passes_over_what_has_no_rule() -> None:
    options = PolicyOptions(names=("claa", "criticalkv", "kvzip"), rates=(0.5,), decoding_tokens=48)
    claa, critical, kvzip = chosen_variants(options, (0.5,))
    for variant in (claa, critical):
        assert variant.policy.decoding is not None
        assert "retention_tokens=48" in str(variant.policy.decoding)
    assert kvzip.policy.decoding is None
    for alone in (
        PolicyOptions(names=("kvzip",), decoding_tokens=48),
        PolicyOptions(parts={"selector": PartOption("global_threshold")}, decoding_tokens=48),
    ):
        with pytest.raises(ValueError, match="--decoding-tokens must be given with a policy"):
            chosen_variants(alone, (0.5,))


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
