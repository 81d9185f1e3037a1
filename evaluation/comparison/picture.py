"""Draw a comparison: what each policy keeps of full context's answers, and what it costs."""

from kvpolicy.evaluation.comparison.study import Comparison, Row
from kvpolicy.evaluation.comparison.table import grouped, name_of
from kvpolicy.evaluation.pictures import new_figure, png

_COLOURS = ("#9ecae1", "#2171b5", "#08306b", "#6a51a3", "#a63603", "#7f2704")
_WIDTH, _HEIGHT = 10.0, 0.26


def plot_comparison(found: Comparison) -> bytes:
    """Plot right answers, or the probability lost, and the time of prefill; return PNG bytes.

    A line for each policy and a dot for each budget, with the 95% interval of its right answers.
    The times have a panel if there are any.
    """
    groups = {budget: rows for budget, rows in grouped(found).items() if budget}
    names = list(dict.fromkeys(name_of(row.variant) for rows in groups.values() for row in rows))
    scored = found.full.total.score is not None
    best = {name: _best(found, groups, name) for name in names}
    names.sort(key=lambda name: best[name], reverse=True)
    figure = new_figure(_WIDTH, len(names) + 4)
    ratios = (3,) if found.full.times is None else (3, 2)
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)[0]
    answers = panels[0]
    for index, (budget, rows) in enumerate(groups.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        shift = _HEIGHT * (index - (len(groups) - 1) / 2)
        for row in rows:
            line = names.index(name_of(row.variant))
            place, value = line + shift, row.total.score
            if row.total.interval is not None:
                ends = [100 * each for each in row.total.interval]
                answers.plot(ends, [place, place], color=colour, linewidth=1.2, alpha=0.6)
            shown = found.lost(row) if value is None else 100 * value
            answers.plot(shown, place, "o", color=colour, label=f"keeping {budget}")
            if row.times is not None and found.full.times is not None:
                ratio = row.times.ratio(found.full.times, "prefill").median
                panels[1].barh(line, ratio, height=0.6, color="#999999")
    answers.set_yticks(range(len(names)), names, fontsize=9)
    answers.set_ylim(len(names) - 0.4, -0.6)
    if scored:
        full = 100 * (found.full.total.score or 0.0)
        answers.axvline(full, color="black", linewidth=1, linestyle=":")
        answers.set_xlim(-3, 103)
        answers.set_xlabel(f"right answers of {found.questions}, %; dotted: full context")
    else:
        answers.axvline(0, color="black", linewidth=1, linestyle=":")
        answers.set_xlabel("nats lost for each token; dotted: full context")
    handles, labels = answers.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    answers.legend(unique.values(), unique.keys(), fontsize=8, loc="best")
    for cost in panels[1:]:
        cost.axvline(1, color="black", linewidth=1, linestyle=":")
        cost.set_xlabel("time of prefill; full context = 1")
    for axes in panels:
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    asked = "asked after reading" if found.later else "known while reading"
    figure.suptitle(f"prompts of up to {found.longest:,} tokens, the question {asked}", fontsize=10)
    return png(figure)


def _best(found: Comparison, groups: dict[str, list[Row]], name: str) -> tuple[float, float]:
    own = [row for rows in groups.values() for row in rows if name_of(row.variant) == name]
    return max(row.total.score or 0.0 for row in own), -min(found.lost(row) for row in own)
