"""Run `kvpolicy calibrate`: choose the layer after which FastKV may drop tokens."""

from typing import Annotated

from kvpolicy.assignments import parse_assignments
from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option
from kvpolicy.evaluation.defaults import CALIBRATION_SEED_OFFSET, CRITERIA, TOLERANCE

FILES = ("calibrate.json", "calibrate.png")
# The parameters of FastKV's drop, except for the layer and the rate.
DROP = ("window_size", "kernel_size", "protect")


def calibrate(
    *,
    task: shared.Task = "needles",
    context: shared.Context = 1000,
    count: shared.Count = 8,
    seed: shared.Seed = CALIBRATION_SEED_OFFSET,
    tsp_rate: shared.TspRate = 0.2,
    assignments: Annotated[
        list[str] | None, option("NAME=VALUE", f"Set {', '.join(DROP)}; repeatable.", "--set")
    ] = None,
    max_layer: Annotated[
        int | None, option("N", "Last layer to try; default: FastKV's own layer.", min=0)
    ] = None,
    criterion: Annotated[
        str, option("NAME", f"How to choose the layer: {' or '.join(CRITERIA)}.")
    ] = CRITERIA[0],
    tolerance: Annotated[
        float, option("X", "With earliest, the largest normalised distance that is close.")
    ] = TOLERANCE,
    model: shared.ModelName = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    beyond_positions: shared.BeyondPositions = False,
    threads: shared.Threads = None,
    out: shared.Out = None,
) -> None:
    """Choose the layer after which FastKV drops tokens, so that the output changes little.

    No keys and values are evicted, so that only the drop has an effect. No answers are needed.
    """
    drop = parse_assignments(assignments or (), "--set")
    for name in drop:
        if name not in DROP:
            raise ValueError(f"--set must name one of {', '.join(DROP)} here, got {name}")
    threads = shared.check_before(out, FILES, threads, task)

    import torch

    from kvpolicy.evaluation.analysis import distances as measuring
    from kvpolicy.evaluation.commands import terminal
    from kvpolicy.evaluation.readable import check_positions, positions_notes
    from kvpolicy.policies import FastKV

    measuring.check_criterion(criterion, tolerance)
    try:
        # What is kept does not matter here, but must not exceed what goes on to later layers.
        FastKV(retention_tokens=1, tsp_rate=tsp_rate, **drop)
    except TypeError as error:
        raise ValueError(str(error)) from error
    torch.set_num_threads(threads)
    loaded = terminal.load_shown(model, dtype=dtype, device=device)
    inputs = shared.prompts_of(loaded, task, context, count, seed)
    longest = max(prompt.shape[1] for prompt in inputs)
    check_positions(loaded, longest, beyond=beyond_positions, remedy="shorter prompts")
    settings = {"max_layer": max_layer, "restart": False, **drop}
    with terminal.progress_bar() as progress:
        found = measuring.output_distances(
            loaded.model, inputs, tsp_rate, progress=progress, **settings
        )
    console = terminal.plain_console()
    console.print("TSP layer  prefill %  distance  normalised     worst", style="bold")
    for at, rate, *far in found.by_layer:
        console.print("{:9}  {:9.1f}  {:8.3g}  {:10.3g}  {:8.3g}".format(at, 100 * rate, *far))
    console.print(
        f"\ndistance: of the last token's final hidden state at TSP rate {tsp_rate:g} from full "
        f"context's, squared; the mean over {shared.described(inputs)}. normalised: over the "
        "squared norm of full context's state; worst: of a prompt. prefill: layer-tokens computed, "
        "of a full prefill's.",
        style="dim",
        soft_wrap=False,
    )
    for note in positions_notes(loaded.model, longest):
        console.print(note)
    try:
        layer = found.choose(criterion, tolerance)
    except ValueError as error:
        left = "" if out is None else f"; nothing is written to {out}"
        raise ValueError(f"no TSP layer is chosen{left}: {error}") from None
    why = f"the smallest distance of layers {found.layers[0]} to {found.layers[-1]}"
    if criterion == "earliest":
        why = f"the earliest with a normalised distance of at most {tolerance:g}"
    console.print(f"\nTSP layer {layer}: {why}.")
    console.print(f"Use FastKV(tsp_layer={layer}), or --policy fastkv --set tsp_layer={layer}.")
    if out is not None:
        from kvpolicy.evaluation.analysis.plots import plot_calibration

        data = {
            **{"model": loaded.name, "dtype": loaded.dtype},
            **{"task": task, "seed": seed, "prompt_tokens": list(found.lengths)},
            **{"tsp_rate": tsp_rate, "parameters": drop},
            **{"criterion": criterion, "tolerance": tolerance, "tsp_layer": layer},
            "layers": [each._asdict() for each in found.by_layer],
        }
        shown = plot_calibration(found, layer, tolerance if criterion == "earliest" else None)
        shared.write(out, FILES, loaded, data, shown)
