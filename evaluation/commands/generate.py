"""Run `kvpolicy generate`: one completion under a policy."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvpolicy.evaluation.commands.chosen import chosen_variant
from kvpolicy.evaluation.commands.options import (
    DecodingEveryOption,
    DecodingTokensOption,
    PolicyOption,
    PropagationOption,
    ProtectOption,
    RateOption,
    RetentionTokensOption,
    ScorerOption,
    SelectorOption,
    SetOption,
    TSPLayerOption,
    policy_options,
)
from kvpolicy.evaluation.commands.stream import stream
from kvpolicy.evaluation.commands.terminal import (
    BeyondPositionsOption,
    DeviceOption,
    DtypeOption,
    load_shown,
)
from kvpolicy.evaluation.models import default_tsp_layer
from kvpolicy.evaluation.prompt_tokens import encode_prompt
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.tasks.prompts import read_prompt

DEFAULT = "fastkv"


def generate(
    prompt_file: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The prompt, UTF-8 text, or - for standard input; line ends at its end are cut "
            "off.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A folder, a Hub name, or a bundled model: needle, ruler_words, long_answers.",
        ),
    ] = "needle",
    policy: PolicyOption = None,
    rate: RateOption = None,
    retention_tokens: RetentionTokensOption = None,
    protect: ProtectOption = None,
    parameters: SetOption = None,
    scorer: ScorerOption = None,
    selector: SelectorOption = None,
    propagation: PropagationOption = None,
    decoding_tokens: DecodingTokensOption = None,
    decoding_every: DecodingEveryOption = None,
    tsp_rate: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Fraction of the context that goes on, in (0, 1]."),
    ] = None,
    tsp_layer: TSPLayerOption = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate at most.")
    ] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Sample; greedy otherwise.")] = False,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of --sample, above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of --sample.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template; by default where there is one."),
    ] = None,
    beyond_positions: BeyondPositionsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Stream a completion to stdout; then, on stderr, what the cache held.

    Without --policy FastKV, at its own retention rate.
    """
    options = policy_options(
        policy,
        rate,
        retention_tokens,
        protect,
        [
            *(parameters or ()),
            *([] if tsp_rate is None else [f"tsp_rate={tsp_rate!r}"]),
            *([] if tsp_layer is None else [f"tsp_layer={tsp_layer}"]),
        ],
        scorer=scorer,
        selector=selector,
        propagation=propagation,
        decoding_tokens=decoding_tokens,
        decoding_every=decoding_every,
    )
    variant = chosen_variant(options, DEFAULT, tsp_layer=default_tsp_layer(model))
    chosen = variant.policy
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")
    text = read_prompt(prompt_file)
    loaded = load_shown(model, dtype, device)
    chosen.check_model(loaded.model.config.num_hidden_layers)
    input_ids = encode_prompt(loaded, text, chat=chat)
    check_positions(
        loaded,
        input_ids.shape[1],
        max_new_tokens,
        beyond=beyond_positions,
        remedy="a shorter prompt, fewer --max-new-tokens",
    )
    begin = time.perf_counter()
    with Console(stderr=True).status(f"reading {input_ids.shape[1]:,} tokens") as reading:
        cache = stream(
            loaded,
            input_ids,
            chosen,
            max_new_tokens=max_new_tokens,
            temperature=temperature if sample else None,
            seed=seed,
            on_text=reading.stop,
        )
    seconds = time.perf_counter() - begin
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    errors.rule(f"{chosen}, prompt of {input_ids.shape[1]:,} tokens, {seconds:.1f} s")
    errors.print(str(cache.report()))
    for note in positions_notes(loaded.model, input_ids.shape[1]):
        errors.print(note)
