"""Do the work of `kvpolicy analyze`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.analysis.study import Analysis, check, run, write
from kvpolicy.evaluation.commands.analyze import AnalyzeOptions
from kvpolicy.evaluation.commands.terminal import load_shown, progress_bar, show_written

# Number of columns beside the layer, so that a table fits 80 columns if k has six digits.
MAX_COLUMNS = 6


def run_analyze(options: AnalyzeOptions) -> None:
    """Do what `kvpolicy analyze` does."""
    settings, out = options.settings, options.out
    texts = check(settings, out)
    loaded = load_shown(settings)
    with progress_bar() as progress:
        analysis = run(settings, texts, loaded, progress)
    show(analysis)
    if out is not None:
        show_written(out, write(analysis, out))


def show(analysis: Analysis) -> None:
    """Print an attention analysis: its tables, their legends and the notes."""
    console = Console(highlight=False, markup=False)
    tables = [*_attention(analysis), _overlaps(analysis), _outputs(analysis)]
    shown = [each for each in tables if each[0].row_count]  # a single layer has no neighbour
    for index, (table, legend) in enumerate(shown):
        if index:
            console.print()
        console.print(table)
        if legend:
            console.print()
            console.print(legend, style="dim")
    for note in analysis.notes:
        console.print(note)


def _attention(analysis: Analysis) -> list[tuple[Table, str]]:
    """Return tables of each layer's attention overlap and recall, and the legend after the last."""
    pairs, ks = analysis.overlap.pairs, list(analysis.recall)
    following = [_percent(pairs[layer][layer + 1]) for layer in range(len(pairs) - 1)]
    columns = {"overlap\nwith next %": [*following, "-"]}
    columns |= {f"top\n{k:,} %": list(map(_percent, analysis.recall[k])) for k in ks}
    headers = list(columns)
    tables = []
    for first in range(0, len(headers), MAX_COLUMNS):
        shown = headers[first : first + MAX_COLUMNS]
        table = _table("layer", *shown)
        for layer in range(len(pairs)):
            table.add_row(str(layer), *(columns[header][layer] for header in shown))
        tables.append((table, ""))
    lengths = [length for group in analysis.lengths.values() for length in group]
    span = f"{min(lengths):,}" + (f" to {max(lengths):,}" if len(set(lengths)) > 1 else "")
    legend = (
        f"overlap: share of the {analysis.overlap.k:,} most attended tokens that two layers have "
        f"in common ({_percent(analysis.chance)}% by chance). top: share of a layer's attention "
        f"that its top tokens get. Attention is that of the last {analysis.settings.window_size} "
        f"tokens, averaged over heads and {len(lengths)} prompt{'s' * (len(lengths) > 1)} of "
        f"{span} tokens."
    )
    return [*tables[:-1], (tables[-1][0], legend)]


def _overlaps(analysis: Analysis) -> tuple[Table, str]:
    columns = [analysis.overlap.by_distance(layers) for layers in analysis.parts.values()]
    table = _table("layers\napart", *(f"{name}\noverlap %" for name in analysis.parts))
    for distance in range(1, analysis.overlap.num_layers):
        cells = (_percent(each[distance]) if distance < len(each) else "-" for each in columns)
        table.add_row(str(distance), *cells)
    return table, "Mean overlap of two layers, by their distance in layers."


def _outputs(analysis: Analysis) -> tuple[Table, str]:
    found = analysis.distances
    headers = [f"{kind}\n{way}" for kind in found for way in ("propagation", "restart")]
    table = _table("layer", *headers)
    columns = [
        means for each in found.values() for means in (each.mean_propagated, each.mean_restarted)
    ]
    for index, layer in enumerate(next(iter(found.values())).layers):
        table.add_row(str(layer), *(f"{column[index]:.4f}" for column in columns))
    return table, (
        "||h_full - h|| / ||h_full|| of the last token's final hidden state, if "
        f"{100 * analysis.settings.tsp_rate:g}% of the tokens go on after the layer "
        "(propagation), or if the prefill restarts on as many (restart)."
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in (first, *others):
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"
