"""Do the work of `kvpolicy estimate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

import kvpolicy
from kvpolicy.evaluation.commands.estimate import EstimateOptions
from kvpolicy.evaluation.commands.work.estimate_memory import (
    MemoryFound,
    find_memory,
    memory_headline,
    memory_notes,
    memory_table,
    memory_warnings,
    weights_of,
)
from kvpolicy.evaluation.commands.work.terminal import plain_console, progress_bar
from kvpolicy.evaluation.comparison.chosen import COMPOSITION, chosen_variants
from kvpolicy.evaluation.comparison.tables import byte_unit
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.estimate import Estimate
from kvpolicy.evaluation.cost.estimate import estimate as count
from kvpolicy.evaluation.cost.model_shape import LayerShape, ModelShape
from kvpolicy.evaluation.cost.shapes import load_config, load_shape
from kvpolicy.evaluation.models import DTYPES
from kvpolicy.evaluation.refusals import naming
from kvpolicy.evaluation.results import as_json, check_file, write_all

# The paper's rates.
PAPER_RATES = (0.1, 0.2)
# Notes name at most this many layers.
MAX_NAMED = 4
LEGEND = (
    "compute: layer-tokens of the prefill, % of a full prefill (the papers' figure).",
    "FLOP: 2 per multiply-add; linear layers, causal attention (half the square),",
    "output head for the last token. allowed: full context's FLOP / the policy's.",
    "kept: mean tokens per layer after prefill. KV: their bytes, % of a full cache.",
)


def run_estimate(options: EstimateOptions) -> None:
    """Do what `kvpolicy estimate` does."""
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    config, context, dtype = options.config, options.context, DTYPES[options.dtype]
    policies, json_file = options.policies, options.json_file
    if json_file is not None:
        check_file("--json", json_file)
    asked = options.memory.asked(policies)
    unbounded = attrs.evolve(policies, decoding_tokens=None, decoding_every=None)
    chosen = chosen_variants(unbounded, PAPER_RATES)
    shape = load_shape(config)
    found = [_counted(each, shape, context, dtype) for each in chosen]
    # Before anything is printed, check that the model can run without weights, and count these.
    model = None
    if asked is not None:
        model = ModelMemory(load_config(config), config, dtype, asked.attention)
        weights_of(asked, model)
    notes = notes_of(shape, context, [_placed(each, shape) for each in chosen])
    console = Console(highlight=False, markup=False)
    console.print(headline(shape, context, options.dtype), style="dim", soft_wrap=True)
    console.print()
    console.print(estimate_table(chosen, found))
    console.print()
    for line in LEGEND:
        console.print(line, style="dim")
    for note in notes:
        console.print(note)
    fitting = None
    if asked is not None and model is not None:
        with progress_bar() as progress:
            fitting = find_memory(asked, policies, model, shape, chosen, found, progress)
        _show_memory(console, fitting)
    if json_file is not None:
        settings = {"config": config, "context": context, "dtype": options.dtype}
        rows = [_row(*each) for each in zip(chosen, found, strict=True)]
        _write(json_file, settings, shape, rows, [*LEGEND, *notes], fitting)
        plain_console().print(f"\nwritten to {json_file}")


def _counted(variant: Variant, shape: ModelShape, context: int, dtype: torch.dtype) -> Estimate:
    with naming(variant.label):
        return count(variant.policy, shape, context, dtype=dtype)


def _show_memory(console: Console, fitting: MemoryFound) -> None:
    console.print()
    console.print(memory_headline(fitting), style="dim", soft_wrap=True)
    console.print()
    console.print(memory_table(fitting))
    console.print()
    for line in memory_notes(fitting):
        console.print(line, style="dim")
    for warning in memory_warnings(fitting):
        console.print(warning)


def headline(shape: ModelShape, context: int, dtype: str) -> str:
    """Return lines that describe the model, its layers and the prompt of a cost estimate."""
    kinds = Counter(_layer_text(layer) for layer in shape.layers)
    layers = f"{shape.num_layers} layers, hidden size {shape.hidden_size:,}"
    if len(kinds) == 1:
        layers = f"{layers}: {next(iter(kinds))}"
    else:
        layers = "\n".join([layers, *(f"  {count}: {kind}" for kind, count in kinds.items())])
    return (
        f"model {shape.name}\n{layers}\n"
        f"prompt of {context:,} tokens, keys and values in {dtype}, batch 1"
    )


def _layer_text(layer: LayerShape) -> str:
    """Describe a layer as text: its attention heads, window and stored state."""
    if not layer.query_heads:
        return "a state" if layer.state_elements else "experts or an MLP alone"
    text = f"{layer.query_heads} query and {layer.kv_heads} KV heads of {layer.key_dim}"
    if not layer.token_elements:
        text = f"{layer.query_heads} query heads of {layer.key_dim}, another layer's keys"
    elif layer.token_elements < layer.kv_heads * (layer.key_dim + layer.value_dim):
        text = (
            f"{layer.query_heads} heads of {layer.key_dim}, a latent of {layer.token_elements:,} "
            "a token"
        )
    if layer.window is not None:
        text += f", {'chunks' if layer.chunked else 'a window'} of {layer.window:,}"
    return text + (", and a state" if layer.state_elements else "")


def estimate_table(chosen: Sequence[Variant], found: Sequence[Estimate]) -> Table:
    """Return a table of estimated costs with a row per policy, for an 80-column terminal."""
    prefix, flops = _flop_unit(max(each.prefill.total for each in found))
    unit, unit_bytes = byte_unit(found[0].full_kv_bytes)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("policy", overflow="fold")
    for header in (
        "rate",
        "compute\n%",
        f"prefill\n{prefix}FLOP",
        "\nallowed",
        "\nkept",
        f"KV\n{unit}",
        "KV\n%",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for variant, each in zip(chosen, found, strict=True):
        rate, tokens = variant.retention_rate, variant.retention_tokens
        computed = ["-"] * 3
        if each.compute_rate is not None:
            computed[0] = f"{100 * each.compute_rate:.1f}"
            computed[1:] = f"{each.prefill.total / flops:.2f}", f"x{each.speedup:.2f}"
        table.add_row(
            variant.name,
            f"{rate:g}" if rate is not None else "-" if tokens is None else f"{tokens:,}",
            *computed,
            f"{each.mean_kept:,.0f}",
            f"{each.kv_bytes / unit_bytes:.{0 if unit_bytes == 1 else 2}f}",
            f"{100 * each.kv_share:.1f}",
        )
    return table


def notes_of(shape: ModelShape, context: int, chosen: Sequence[Variant]) -> list[str]:
    """Return notes on where policies drop tokens and on what the estimate does not count."""
    notes = []
    if shape.max_positions is not None and context > shape.max_positions:
        notes.append(
            f"The prompt exceeds the {shape.max_positions:,} positions that the model is made for."
        )
    notes += _window_notes(shape, context, chosen)
    states = [layer for layer in shape.layers if layer.state_elements]
    if states:
        notes.append(
            f"{len(states)} of {shape.num_layers} layers hold a state, which no policy shrinks; "
            "after a drop they read only the tokens that are left."
        )
    notes += [f"{COMPOSITION}: {each.policy}." for each in chosen if each.name == COMPOSITION]
    for name in dict.fromkeys(each.name for each in chosen):
        propagation = next(each.policy.propagation for each in chosen if each.name == name)
        acting = sorted(propagation.acting_layers(shape.num_layers))
        if 0 < len(acting) <= MAX_NAMED:
            does = (
                "chooses tokens and restarts at" if propagation.restarts else "drops tokens after"
            )
            layers = ", ".join(map(str, acting))
            notes.append(f"{name} {does} layer {layers} of 0 to {shape.num_layers - 1}.")
    by_content = [each for each in chosen if each.policy.propagation.decides_by_content]
    for name in dict.fromkeys(each.name for each in by_content):
        notes.append(
            f"{name} decides by the prompt's content how many tokens go on: its compute is known "
            "only after a prompt is read, and the kept tokens shown here are the maximum."
        )
    for each in chosen:
        rate = each.retention_rate
        if rate is not None and each.parameters.get("tsp_rate") == rate:
            notes.append(
                f"{each.label}: tsp_rate is {rate:g}, since layers after the drop cannot keep "
                "more tokens than reach them."
            )
    readers = dict.fromkeys(each.name for each in chosen if each.policy.num_queries is None)
    most = f"; it costs most under policies that read all queries: {', '.join(readers)}"
    notes.append(f"Scoring is not counted{most if readers else ''}.")
    return notes


def _placed(variant: Variant, shape: ModelShape) -> Variant:
    """Return a copy of the policy variant, with a layer of this model for each layer left unset."""
    return attrs.evolve(variant, policy=variant.policy.placed(shape.num_layers, shape.eligible))


def _window_notes(shape: ModelShape, context: int, chosen: Sequence[Variant]) -> list[str]:
    """Return notes on sliding windows shorter than the prompt and on policies these exclude."""
    short = [i for i, each in enumerate(shape.layers) if (each.window or context) < context]
    if not short:
        return []
    first = shape.layers[short[0]]
    notes = [
        f"{len(short)} of {shape.num_layers} layers see only "
        f"{'chunks' if first.chunked else 'a sliding window'} of {first.window:,} tokens, and "
        f"keep {'the last chunk' if first.chunked else 'this window'} under every policy."
    ]
    seeing = [str(i) for i in shape.eligible if i not in short]
    for name in dict.fromkeys(each.name for each in chosen):
        propagation = next(each.policy.propagation for each in chosen if each.name == name)
        acting = propagation.acting_layers(shape.num_layers)
        if propagation.restarts and acting:
            notes.append(
                f"{name} restarts the prefill, which PolicyCache refuses for prompts longer than "
                "a sliding window."
            )
        elif not acting.isdisjoint(short):
            notes.append(
                f"{name} drops tokens after layers with a sliding window, which PolicyCache "
                f"refuses; layers that see the whole prompt: {', '.join(seeing) or 'none'}."
            )
    return notes


def _row(variant: Variant, found: Estimate) -> dict[str, Any]:
    return {
        "policy": variant.name,
        "retention_rate": variant.retention_rate,
        "retention_tokens": variant.retention_tokens,
        "parameters": dict(variant.parameters),
        **found.as_data(),
    }


def _write(
    file: Path,
    settings: Mapping[str, Any],
    shape: ModelShape,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    fitting: MemoryFound | None,
) -> None:
    data: dict[str, Any] = {
        "kvpolicy": kvpolicy.__version__,
        "settings": settings,
        "model": attrs.asdict(shape),
        "rows": rows,
        "notes": notes,
    }
    if fitting is not None:
        data["memory"] = fitting.as_data()
        data["memory"]["notes"] = [*memory_notes(fitting), *memory_warnings(fitting)]
    write_all(file.parent, {file.name: as_json(data)})


def _flop_unit(flops: float) -> tuple[str, float]:
    """Return the SI prefix and factor that show an operation count with at most three digits."""
    power = min(max(len(str(int(flops))) - 1, 0) // 3, 6)
    return ("", "k", "M", "G", "T", "P", "E")[power], 1000.0**power
