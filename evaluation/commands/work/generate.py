"""Do the work of `kvpolicy generate`."""

from __future__ import annotations

import math
import time

import attrs
from rich.console import Console

from kvpolicy.evaluation.commands.generate import GenerateOptions
from kvpolicy.evaluation.commands.work.stream import stream
from kvpolicy.evaluation.commands.work.terminal import load_shown, plain_console
from kvpolicy.evaluation.comparison.chosen import chosen_variant
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.evaluation.prompt_tokens import encode_prompt
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.tasks.prompts import read_prompt

DEFAULT = "fastkv"


def run_generate(options: GenerateOptions) -> None:
    """Do what `kvpolicy generate` does."""
    chosen = _variant(options).policy
    if not 0 < options.temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {options.temperature}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {options.seed}")
    text = options.prompt if options.prompt_file is None else read_prompt(options.prompt_file)
    assert text is not None  # exactly one of the two is given
    loaded = load_shown(options)
    chosen.check_model(loaded.model.config.num_hidden_layers)
    input_ids = encode_prompt(loaded, text, chat=options.chat)
    check_positions(
        loaded,
        input_ids.shape[1],
        options.max_new_tokens,
        beyond=options.beyond_positions,
        remedy="a shorter prompt, fewer --answer-tokens",
    )
    begin = time.perf_counter()
    with Console(stderr=True).status(f"reading {input_ids.shape[1]:,} tokens") as reading:
        cache = stream(
            loaded,
            input_ids,
            chosen,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature if options.sample else None,
            seed=options.seed,
            on_text=reading.stop,
        )
    seconds = time.perf_counter() - begin
    errors = plain_console(stderr=True)
    errors.rule(f"{chosen}, prompt of {input_ids.shape[1]:,} tokens, {seconds:.1f} s")
    errors.print(str(cache.report()))
    for note in positions_notes(loaded.model, input_ids.shape[1]):
        errors.print(note)


def _variant(options: GenerateOptions) -> Variant:
    """Build the policy that the options ask for."""
    own = {"tsp_rate": options.tsp_rate, "tsp_layer": options.tsp_layer}
    given = {name: value for name, value in own.items() if value is not None}
    policies = attrs.evolve(options.policies, assignments=options.policies.assignments | given)
    return chosen_variant(policies, DEFAULT, tsp_layer=default_tsp_layer(options.model))
