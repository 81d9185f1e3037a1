"""Declares command-line options as fields of attrs classes, and the options commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import attrs

from kvpolicy.assignments import PartOption, parse_assignments
from kvpolicy.checks import check_count
from kvpolicy.evaluation.defaults import DTYPE_NAMES, MIN_NEEDLE_CONTEXT, NEEDLE
from kvpolicy.evaluation.model_names import check_model_name
from kvpolicy.evaluation.policy_options import split_names
from kvpolicy.names import check_declared


@attrs.frozen
class Option:
    """How a settings field appears on the command line: ``Annotated[type, Option(...)]``.

    Args:
        help: What it is.
        names: Its names; none for the field's own, with ``-`` for ``_``.
        metavar: What the help calls its value; a flag has none.
        min: The least value of a number.
        read: Makes the field's value of the text, or of all texts where the option is repeatable,
            and of the option's name, for messages; None where the type says how.
        positional: Whether it is an argument without a name.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str = attrs.field(default="N", kw_only=True)
    min: int | None = attrs.field(default=None, kw_only=True)
    read: Callable[[Any, str], Any] | None = attrs.field(default=None, kw_only=True)
    positional: bool = attrs.field(default=False, kw_only=True)


def check_scorers(texts: Iterable[str]) -> None:
    """Check the scorers' names in texts as `PartOption.parse` takes them, see `check_declared`."""
    check_declared({"scorer": [PartOption.parse(each, "--scorer").name for each in texts]})


MODEL = "The model: a folder, a Hub name, or needle, the bundled model."
PROMPT = (
    "File with the prompt as UTF-8 text, or - for standard input; line ends at the end are removed."
)
# Options that only some commands require, or whose default differs by command.
CHAT = Option("Use the model's chat template; default: if it has one.", ("--chat/--no-chat",))
JSON = Option("File to write the numbers to, as JSON.", ("--json",), metavar="FILE")
SCORER = Option(
    "Scorer of a composed policy: a name, or name:parameter=value,...; default: SnapKV's.",
    metavar="PART",
)
THREADS = Option(
    "CPU threads; default: OMP_NUM_THREADS, else the idle processors, at most 4.", min=1
)
TSP_LAYER = Option(
    "Layer after which FastKV drops tokens, counted from 0; default: the policy's own, or the "
    "one chosen for the bundled model."
)


@attrs.frozen
class LoadingOptions:
    """Command-line options that say which model is loaded, and how.

    Raises:
        ValueError: The model is a path, and no folder of a model.
    """

    model: Annotated[str, Option(MODEL, metavar="NAME")] = NEEDLE
    dtype: Annotated[
        str,
        Option(
            f"Number format of the weights: auto (the checkpoint's own), {', '.join(DTYPE_NAMES)}.",
            metavar="NAME",
        ),
    ] = "auto"
    device: Annotated[
        str, Option("Device to compute on, by its name in torch: cpu, cuda.", metavar="NAME")
    ] = "cpu"

    def __attrs_post_init__(self) -> None:
        check_model_name(self.model)  # before anything heavy is imported


@attrs.frozen
class ModelOptions(LoadingOptions):
    """Command-line options for the model that reads prompts."""

    beyond_positions: Annotated[
        bool,
        Option(
            "Read prompts with more tokens than the model has positions; otherwise they are "
            "refused."
        ),
    ] = False


@attrs.frozen
class NeedleOptions(ModelOptions):
    """Command-line options for the model and the needle task's prompts."""

    context: Annotated[
        int, Option("Number of tokens in a needle prompt, at least 64.", min=MIN_NEEDLE_CONTEXT)
    ] = 1024
    count: Annotated[
        int, Option("Number of needle prompts; half have one hop, half two.", min=2)
    ] = 16


# Parameters that have an option of their own.
OWN_OPTIONS = {
    "retention_rate": "--rate",
    "retention_tokens": "--retention-tokens",
    "protect": "--protect",
    "decoding": "--decoding-tokens",
}


@attrs.frozen(kw_only=True)
class PrefillOptions:
    """Command-line options for the policies and what they keep of a prompt.

    Without names it asks for all registered policies, or for a composition alone.

    Raises:
        ValueError: Rates and numbers of tokens are both given, an assignment is of a parameter
            that has an option of its own, or a name is known to be wrong.
    """

    names: Annotated[
        tuple[str, ...],
        Option(
            "Policies to use, by their names in `kvpolicy policies`; comma-separated or repeated.",
            ("--policy", "--policies", "-p"),
            metavar="NAMES",
            read=split_names,
        ),
    ] = ()
    rates: Annotated[
        tuple[float, ...],
        Option(
            "Fraction of the context that every layer keeps, in (0, 1]; repeatable.",
            ("--rate", "--retention-rate", "-r"),
            metavar="RATE",
        ),
    ] = ()
    tokens: Annotated[
        tuple[int, ...],
        Option(
            "Number of tokens that every layer keeps, instead of --rate; repeatable.",
            ("--retention-tokens",),
        ),
    ] = ()
    protect: Annotated[
        int | None, Option("Number of the context's first tokens that are always kept.")
    ] = None
    assignments: Annotated[
        dict[str, Any],
        Option(
            "Set a parameter, such as window_size=16, of every policy and part that takes it; "
            "repeatable. Parameters given with a part override it.",
            ("--set",),
            metavar="NAME=VALUE",
            read=parse_assignments,
        ),
    ] = attrs.field(factory=dict)
    scorer: Annotated[PartOption | None, attrs.evolve(SCORER, read=PartOption.parse)] = None
    selector: Annotated[
        PartOption | None,
        Option(
            "Selector of a composed policy, written as --scorer is; default: SnapKV's.",
            metavar="PART",
            read=PartOption.parse,
        ),
    ] = None
    propagation: Annotated[
        PartOption | None,
        Option(
            "Propagation policy of a composed policy, written as --scorer is; default: SnapKV's.",
            metavar="PART",
            read=PartOption.parse,
        ),
    ] = None

    def __attrs_post_init__(self) -> None:
        if self.rates and self.tokens:
            raise ValueError("at most one of --rate and --retention-tokens may be given, got both")
        for name, option in OWN_OPTIONS.items():
            if name in self.assignments:
                raise ValueError(f"{name} must be given by {option}, got --set {name}")
        parts = {kind: [part.name] for kind, part in self.parts.items()}
        check_declared({"policy": self.names, **parts})

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters from the command line, passed to each policy that takes them."""
        return self.assignments | ({} if self.protect is None else {"protect": self.protect})

    @property
    def parts(self) -> dict[str, PartOption]:
        """The policy parts to compose, by kind, such as "scorer"; empty if none is given."""
        parts = {
            "scorer": self.scorer,
            "selector": self.selector,
            "propagation": self.propagation,
        }
        return {kind: part for kind, part in parts.items() if part is not None}

    def refuse(self, command: str, **reasons: str) -> None:
        """Raise ValueError for given options that do not apply to a command.

        Args:
            command: The command.
            reasons: For each field that must be empty, why: names, rates, tokens or parts.

        Raises:
            ValueError: One is given.
        """
        said = {
            "names": ("--policy", self.names),
            "rates": ("--rate", self.rates),
            "tokens": ("--retention-tokens", self.tokens),
            "parts": ("--scorer, --selector and --propagation", tuple(self.parts)),
        }
        for field, reason in reasons.items():
            option, given = said[field]
            if given:
                raise ValueError(
                    f"{option} must not be given to kvpolicy {command}: {reason}, got "
                    f"{', '.join(map(str, given))}"
                )


@attrs.frozen(kw_only=True)
class PolicyOptions(PrefillOptions):
    """Command-line options for the policies and what they keep of prompts and answers.

    Raises:
        ValueError: See `PrefillOptions`; or only the interval of a bound is given, or one of its
            numbers is below 1.
    """

    decoding_tokens: Annotated[
        int | None,
        Option(
            "Number of tokens that every layer keeps while an answer is decoded, chosen by the "
            "policy's own rule; default: all."
        ),
    ] = None
    decoding_every: Annotated[
        int | None,
        Option("Number of decoded tokens between two evictions; default: the policy's own."),
    ] = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.decoding_every is not None and self.decoding_tokens is None:
            raise ValueError(
                "--decoding-tokens must be given with --decoding-every, got --decoding-every "
                f"{self.decoding_every} alone"
            )
        for option, value in (
            ("--decoding-tokens", self.decoding_tokens),
            ("--decoding-every", self.decoding_every),
        ):
            if value is not None:
                check_count(option, value, minimum=1)
