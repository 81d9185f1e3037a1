"""Run `kvpolicy estimate`: what policies cost on a prompt, before anything is run."""

from typing import Annotated

from kvpolicy.evaluation.commands.shared import Json, option, with_policies
from kvpolicy.evaluation.defaults import DTYPE_NAMES, RATES
from kvpolicy.evaluation.estimate.presets import PRESETS
from kvpolicy.evaluation.policy_options import PolicyOptions


@with_policies
def estimate(
    *,
    config: Annotated[
        str,
        option(
            "NAME",
            f"The model: {', '.join(PRESETS)}, the Hub name of one of these, a folder with a "
            "config.json, the file itself, or the Hub name of a model in the local cache.",
        ),
    ],
    context: Annotated[int, option("N", "Number of tokens in the prompt.", min=1)],
    dtype: Annotated[
        str, option("NAME", f"Number format of weights, keys and values: {', '.join(DTYPE_NAMES)}.")
    ] = "bfloat16",
    answer_tokens: Annotated[int, option("N", "Number of tokens in the answer.", min=1)] = 1024,
    json_file: Json = None,
    policies: PolicyOptions,
) -> None:
    """Estimate policies' prefill compute and the bytes that they hold, without a run.

    It needs neither weights nor a network. Without --policy, all policies are estimated, at the
    papers' rates 0.1 and 0.2.
    """
    import attrs
    from rich.console import Console

    import kvpolicy
    from kvpolicy.evaluation.chosen import chosen_variants
    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.evaluation.estimate import table
    from kvpolicy.evaluation.estimate.cost import estimate_cost
    from kvpolicy.evaluation.estimate.shapes import load_shape
    from kvpolicy.evaluation.models import DTYPES
    from kvpolicy.evaluation.results import as_json, check_file, write_all
    from kvpolicy.evaluation.variant import naming

    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if json_file is not None:
        check_file("--json", json_file)
    chosen = chosen_variants(policies, RATES)
    shape = load_shape(config, DTYPES[dtype])
    found = []
    for each in chosen:
        with naming(each.label):
            found.append(estimate_cost(each.policy, shape, context, answer_len=answer_tokens))
    head = table.headline(shape, found[0], dtype)
    placed = [
        attrs.evolve(each, policy=each.policy.placed(shape.num_layers, shape.eligible))
        for each in chosen
    ]
    notes = table.notes_of(shape, context, placed)
    console = Console(highlight=False, markup=False)
    console.print(head, style="dim", soft_wrap=True)
    console.print()
    console.print(table.estimate_table(chosen, found))
    console.print()
    for line in table.LEGEND:
        console.print(line, style="dim")
    for note in notes:
        console.print(note)
    if json_file is not None:
        data = {
            "kvpolicy": kvpolicy.__version__,
            "settings": {
                "config": config,
                "context": context,
                "answer_tokens": answer_tokens,
                "dtype": dtype,
            },
            "model": attrs.asdict(shape),
            "weight_bytes": found[0].weight_bytes,
            "rows": [
                {**variant.as_data(), **cost.as_data()}
                for variant, cost in zip(chosen, found, strict=True)
            ],
            "notes": [*table.LEGEND, *notes],
        }
        write_all(json_file.parent, {json_file.name: as_json(data)})
        plain_console().print(f"\nwritten to {json_file}")
