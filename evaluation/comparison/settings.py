"""Define the settings of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.defaults import (
    MIN_NEEDLE_CONTEXT,
    NEEDLE_CONTEXT,
    RATES,
    default_tsp_layer,
)
from kvpolicy.evaluation.options import THREADS, TSP_LAYER, ModelOptions, Option, PolicyOptions
from kvpolicy.evaluation.results import default_threads


@attrs.frozen
class Extent:
    """How much a comparison measures by default: retention rates, prompts and timing rounds.

    Args:
        rates: KV retention rates.
        count: Needle prompts.
        rounds: Rounds of timing.
        again: Further rounds, at most, of policies whose speeds vary from round to round.
        timing_seconds: After which no further round is begun; None for no limit. With a random
            model, seconds of the processor.
    """

    rates: tuple[float, ...]
    count: int
    rounds: int
    again: int
    timing_seconds: float | None = None


# The first table in two minutes on two cores, at two rates that tell methods apart: at 2% the good
# ones, at 5% the others. And what is worth reporting.
QUICK = Extent(rates=(0.02, 0.05), count=32, rounds=5, again=2, timing_seconds=120.0)
THOROUGH = Extent(rates=RATES, count=200, rounds=9, again=9)
# With full context, the twelve rows of the first table: the methods that people know, and for each
# thing that a policy can be for at least one that is good at it.
SHOWN = (
    "adakv",
    "criticalkv",
    "pyramidkv",
    "snapkv",
    "fastkv",
    "spirekv",
    "gemfilter",
    "keydiff",
    "h2o",
    "streamingllm",
    "random",
)
SPEED_CONTEXT = 8192


@attrs.frozen(kw_only=True)
class Settings(ModelOptions):
    """The settings of a comparison: model, prompts, policies, and how much is measured."""

    prompts: Annotated[
        Path | None,
        Option(
            'Lines of {"prompt": "...", "answer": "..."}; default: made for needle.',
            ("--prompts-file",),
            metavar="FILE",
        ),
    ] = None
    policies: PolicyOptions = attrs.field(factory=PolicyOptions)
    tsp_layer: Annotated[int | None, TSP_LAYER] = None
    thorough: Annotated[
        bool, Option("All policies, more rates and prompts: many minutes, not two.")
    ] = False
    every_policy: Annotated[bool, Option("All policies, not only twelve.", ("--all",))] = False
    context: Annotated[
        int,
        Option(
            f"Tokens of a prompt that is made, at least 64; default: {NEEDLE_CONTEXT}.",
            min=MIN_NEEDLE_CONTEXT,
        ),
    ] = NEEDLE_CONTEXT
    count: Annotated[
        int,
        Option(
            "Prompts that are made, half of each kind; default: "
            f"{QUICK.count}, thorough {THOROUGH.count}.",
            min=2,
        ),
    ] = attrs.field()
    seed: Annotated[int, Option("Of the prompts that are made.")] = 0
    sweep: Annotated[bool, Option("Also FastKV's accuracy by TSP layer, other prompts.")] = False
    sweep_rates: Annotated[bool, Option("Also by TSP rate and retention rate.")] = False
    _rounds: Annotated[
        int | None,
        Option(
            "Rounds of timing; fewer than 5 tell no speed; default: "
            f"{QUICK.rounds}, fewer after {QUICK.timing_seconds:g} s, thorough {THOROUGH.rounds}; "
            "then again those that vary.",
            min=1,
        ),
    ] = None
    speed_context: Annotated[
        int,
        Option(
            "Tokens of the prompt that is timed with needle, on a random Llama, since its own "
            f"prompts are short; default: {SPEED_CONTEXT:,}.",
            min=MIN_NEEDLE_CONTEXT,
        ),
    ] = SPEED_CONTEXT
    new_tokens: Annotated[
        int,
        Option("Tokens decoded in a round.", ("--answer-tokens",), min=1),
    ] = 32
    threads: Annotated[int, THREADS] = attrs.field(factory=default_threads)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.prompts is not None and self.count != self._extent.count:
            raise ValueError(
                f"--count must be left out with --prompts-file, got {self.count}: it is the number "
                "of prompts that are made, and a file is used whole"
            )

    @count.default
    def _count(self) -> int:
        return self._extent.count

    @property
    def _extent(self) -> Extent:
        return THOROUGH if self.thorough else QUICK

    @property
    def rates(self) -> tuple[float, ...]:
        """The retention rates of keys and values that policies are compared at."""
        return tuple(dict.fromkeys(self.policies.rates)) or self._extent.rates

    @property
    def rounds(self) -> int:
        """The number of times that each policy is timed."""
        return self._rounds or self._extent.rounds

    @property
    def again(self) -> int:
        """The number of further rounds, at most, for policies whose speeds vary."""
        return 0 if self._rounds else self._extent.again

    @property
    def asked_policies(self) -> PolicyOptions:
        """The policies to compare; without names, those that are shown by default, or all."""
        asked = self.policies
        if asked.names or asked.parts or self.every_policy or self.thorough:
            return asked
        return attrs.evolve(asked, names=SHOWN)

    @property
    def own_speed_model(self) -> bool:
        """True if a random model is timed: prompts of the bundled model are too short for it."""
        return self.prompts is None

    @property
    def timing_seconds(self) -> float | None:
        """The seconds after which no new round of timing begins; None for no limit."""
        return None if self._rounds else self._extent.timing_seconds

    @property
    def effective_tsp_layer(self) -> int | None:
        """The layer after which policies drop tokens; None for each policy's default."""
        return default_tsp_layer(self.model) if self.tsp_layer is None else self.tsp_layer
