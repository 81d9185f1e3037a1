"""Write estimates as a table for an 80-column terminal, with what it does not show in words."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from kvpolicy.evaluation.estimate.cost import Estimate
from kvpolicy.evaluation.estimate.model_shape import LayerShape, ModelShape
from kvpolicy.evaluation.variant import Variant
from kvpolicy.interfaces import PropagationPolicy
from kvpolicy.registry import registered

# Notes name at most this many layers.
MAX_NAMED = 4
LEGEND = (
    "compute: layer-tokens of the prefill, % of a full prefill (the papers' figure).",
    "kept: mean tokens per layer after the prompt. KV: their bytes, % of a full",
    "cache. answered KV: bytes after the answer.",
)


def headline(shape: ModelShape, found: Estimate, dtype: str) -> str:
    """Return lines that describe the model, its layers, the prompt and the answer."""
    kinds = Counter(_layer_text(layer) for layer in shape.layers)
    layers = f"{shape.num_layers} layers"
    if len(kinds) == 1:
        layers = f"{layers}: {next(iter(kinds))}"
    else:
        layers = "\n".join([layers, *(f"  {count}: {kind}" for kind, count in kinds.items())])
    return (
        f"model {shape.name}, weights {_bytes_text(found.weight_bytes)}\n{layers}\n"
        f"prompt of {found.context_len:,} tokens, full cache {_bytes_text(found.full_kv_bytes)}\n"
        f"answer of {found.answer_len:,} tokens, all in {dtype}, batch 1"
    )


def _bytes_text(size: int) -> str:
    unit, unit_bytes = byte_unit(size)
    return f"{_in_unit(size, unit_bytes)} {unit}"


def _in_unit(size: int, unit_bytes: int) -> str:
    return f"{size / unit_bytes:.{0 if unit_bytes == 1 else 2}f}"


def _layer_text(layer: LayerShape) -> str:
    """Describe a layer as text: its kind, what it holds for a token, its window and its state."""
    parts = [layer.kind]
    if layer.token_bytes:
        parts.append(f"{layer.token_bytes:,} bytes a token")
    if layer.window is not None:
        parts.append(f"{'chunks' if layer.chunked else 'a window'} of {layer.window:,}")
    if layer.state_elements:
        parts.append(f"a state of {layer.state_elements:,} numbers")
    return ", ".join(parts)


def byte_unit(size: int) -> tuple[str, int]:
    """Return the decimal unit, name and size, that shows a byte count with at most four digits."""
    power = min(max(len(str(size)) - 1, 0) // 3, 4)
    return ("B", "kB", "MB", "GB", "TB")[power], 1000**power


def estimate_table(chosen: Sequence[Variant], found: Sequence[Estimate]) -> Table:
    """Return a table of estimated costs with a row per policy, for an 80-column terminal."""
    unit, unit_bytes = byte_unit(found[0].full_kv_bytes)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("policy", overflow="fold")
    for header in ("rate", "compute\n%", "\nkept", f"KV\n{unit}", "KV\n%", f"answered\nKV {unit}"):
        table.add_column(header, justify="right", no_wrap=True)
    for variant, each in zip(chosen, found, strict=True):
        rate, tokens = variant.retention_rate, variant.retention_tokens
        table.add_row(
            variant.name,
            f"{rate:g}" if rate is not None else "-" if tokens is None else f"{tokens:,}",
            "-" if each.compute_rate is None else f"{100 * each.compute_rate:.1f}",
            f"{each.mean_kept:,.0f}",
            _in_unit(each.kv_bytes, unit_bytes),
            f"{100 * each.kv_share:.1f}",
            _in_unit(each.answered_kv_bytes, unit_bytes),
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
    composed = [each for each in chosen if each.name not in registered("policy")]
    notes += [f"{each.name}: {each.policy}." for each in composed]
    for name, propagation in _propagations(chosen).items():
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


def _propagations(chosen: Sequence[Variant]) -> dict[str, PropagationPolicy]:
    """Return the propagation policy by the name of a policy, of its first variant."""
    found: dict[str, PropagationPolicy] = {}
    for each in chosen:
        found.setdefault(each.name, each.policy.propagation)
    return found


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
    for name, propagation in _propagations(chosen).items():
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
