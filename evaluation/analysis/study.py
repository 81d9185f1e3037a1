"""Run an analysis of a model on prompts: check settings, compute numbers, write files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_rate
from kvpolicy.evaluation.analysis.attention import Overlap, overlap_of, recall_of, window_attention
from kvpolicy.evaluation.analysis.distances import OutputDistances, output_distances
from kvpolicy.evaluation.analysis.inputs import check_k, check_ks, check_layers, check_prompts
from kvpolicy.evaluation.analysis.plots import plot_distances, plot_overlap, plot_recall
from kvpolicy.evaluation.analysis.settings import AnalysisSettings
from kvpolicy.evaluation.defaults import NEEDLE
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.prompt_tokens import encode_prompt
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.results import as_json, check_folder, environment, write_all
from kvpolicy.evaluation.tasks.prompts import needle_prompts
from kvpolicy.evaluation.text_files import read_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILES = ("analyze.json", "overlap.png", "recall.png", "distances.png")


@attrs.frozen
class Analysis:
    """Results of an attention analysis, with its settings and the machine it ran on.

    Args:
        settings: What was asked for.
        environment: Versions and machine; see `kvpolicy.evaluation.results.environment`.
        dtype: The model's.
        lengths: For every kind of prompt, the tokens of each.
        overlap: Of the layers' top-k tokens, the mean over all prompts.
        recall: For each k, each layer's share of attention, the mean over all prompts.
        distances: For every kind of prompt, from the output with full context.
        notes: What a reader has to know.
    """

    settings: AnalysisSettings
    environment: dict[str, Any]
    dtype: str
    lengths: dict[str, tuple[int, ...]]
    overlap: Overlap
    recall: dict[int, tuple[float, ...]]
    distances: dict[str, OutputDistances]
    notes: tuple[str, ...]

    @property
    def chance(self) -> float:
        """The mean overlap of two layers that choose their k tokens at random."""
        lengths = [length for group in self.lengths.values() for length in group]
        return sum(self.overlap.k / length for length in lengths) / len(lengths)

    @property
    def parts(self) -> dict[str, range]:
        """The ranges of layers over which overlap is averaged: all layers, and each half."""
        count = self.overlap.num_layers
        parts = {"all layers": range(count)}
        if count >= 4:
            half = count // 2  # the first layer after the default TSP layer
            parts[f"layers 0-{half - 1}"] = range(half)
            parts[f"layers {half}-{count - 1}"] = range(half, count)
        return parts

    def as_data(self) -> dict[str, Any]:
        """Return the analysis's settings and results as a dict for JSON."""
        settings = attrs.asdict(self.settings)
        settings["prompt_files"] = [str(path) for path in self.settings.prompt_files]
        settings["recall_ks"] = list(self.recall)
        settings["layers"] = list(next(iter(self.distances.values())).layers)
        settings["dtype"] = self.dtype
        return {
            "settings": settings,
            **self.environment,
            "prompts": {kind: list(lengths) for kind, lengths in self.lengths.items()},
            "overlap": {
                "k": self.overlap.k,
                "chance": self.chance,
                "pairs": [list(row) for row in self.overlap.pairs],
                "by_distance": {
                    name: list(self.overlap.by_distance(layers))
                    for name, layers in self.parts.items()
                },
            },
            "recall": [{"k": k, "layers": list(held)} for k, held in self.recall.items()],
            "distances": {kind: found.as_data() for kind, found in self.distances.items()},
            "notes": list(self.notes),
        }


def check(settings: AnalysisSettings, out: Path | None = None) -> list[str]:
    """Check an analysis's settings before a model is loaded, and read the prompt files.

    Args:
        settings: What to analyse.
        out: The folder that results are to go to.

    Returns:
        The texts of the prompt files, line ends at their ends cut off.

    Raises:
        ValueError: A setting is out of its range, or a file does not exist or is no text.
        MissingExtraError: Pictures are wanted and matplotlib is not installed.
    """
    if out is not None:
        check_folder(out, FILES)
        require("matplotlib", extra="plot")
    check_count("k", settings.k, minimum=1)
    check_count("window_size", settings.window_size, minimum=1)
    check_rate("tsp_rate", settings.tsp_rate)
    for name, values, minimum in (
        ("recall k", settings.recall_ks, 1),
        ("layer", settings.layers, 0),
    ):
        for value in values:
            check_count(name, value, minimum=minimum)
    if settings.model != NEEDLE and not settings.prompt_files:
        raise ValueError(
            f"--prompt-file must be given with --model {settings.model}, since the needle task "
            "uses the bundled model's own tokens"
        )
    return [read_prompt(path) for path in settings.prompt_files]


def run(
    settings: AnalysisSettings,
    texts: Sequence[str],
    loaded: Loaded,
    progress: Progress = silent,
) -> Analysis:
    """Run an attention analysis of a model on the prompts.

    Args:
        settings: What to analyse.
        texts: The prompts, from `check`; none for the needle task.
        loaded: The model.
        progress: Told how far it is.

    Raises:
        ValueError: The prompts do not fit the settings or the model; before any of it is run.
    """
    model = loaded.model
    kinds = prompts_of(settings, texts, loaded)
    prompts = [prompt for group in kinds.values() for prompt in group]
    shortest = min(prompt.shape[1] for prompt in prompts)
    check_k(settings.k, shortest)
    ks = settings.ks(shortest)
    check_ks(ks, shortest)
    layers = check_layers(settings.layers or None, model.config.num_hidden_layers)

    overlap, recall = _attention(model, prompts, settings, ks, progress)

    def tell(stage: str, done: int, total: int) -> None:
        progress(f"{stage}, {kind}", done, total)

    distances = {}
    for kind, group in kinds.items():
        distances[kind] = output_distances(
            model,
            group,
            settings.tsp_rate,
            window_size=settings.window_size,
            layers=layers,
            progress=tell,
        )
    return Analysis(
        settings,
        environment(model.device),
        loaded.dtype,
        {kind: tuple(prompt.shape[1] for prompt in group) for kind, group in kinds.items()},
        overlap,
        recall,
        distances,
        tuple(positions_notes(model, max(prompt.shape[1] for prompt in prompts))),
    )


def write(analysis: Analysis, folder: Path) -> list[str]:
    """Write an analysis's numbers and plots into its folder; return the files' names."""
    contents = (
        as_json(analysis.as_data()),
        plot_overlap(analysis.overlap, analysis.parts, analysis.chance),
        plot_recall(analysis.recall),
        plot_distances(analysis.distances),
    )
    write_all(folder, dict(zip(FILES, contents, strict=True)))
    return list(FILES)


def prompts_of(
    settings: AnalysisSettings, texts: Sequence[str], loaded: Loaded
) -> dict[str, list[Tensor]]:
    """Return token ids ``[1, context_len]`` of prompts by kind, from texts or the needle task.

    Args:
        settings: What to analyse.
        texts: The prompts, from `check`; none for the needle task.
        loaded: The model.

    Raises:
        ValueError: They do not fit the settings or the model.
    """
    kinds: dict[str, list[Any]] = {}
    if texts:
        kinds["prompts"] = [encode_prompt(loaded, text, chat=settings.chat) for text in texts]
    else:
        for prompt in needle_prompts(settings.context, settings.count, settings.seed):
            kinds.setdefault(prompt.kind, []).append(prompt.input_ids)
    checked = {
        kind: check_prompts(loaded.model, group, settings.window_size)
        for kind, group in kinds.items()
    }
    longest = max(prompt.shape[1] for group in checked.values() for prompt in group)
    check_positions(loaded, longest, beyond=settings.beyond_positions)
    return checked


def _attention(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    settings: AnalysisSettings,
    ks: Sequence[int],
    progress: Progress,
) -> tuple[Overlap, dict[int, tuple[float, ...]]]:
    """Return top-k overlap of layers and the top tokens' attention share, averaged over prompts."""
    pairs, shares = [], []
    for done, prompt in enumerate(prompts):
        progress("attention", done, len(prompts))
        attention = window_attention(model, prompt, settings.window_size)
        pairs.append(torch.tensor(overlap_of(attention, settings.k).pairs, dtype=torch.float64))
        held = list(recall_of(attention, ks).values())
        shares.append(torch.tensor(held, dtype=torch.float64))
    overlap = torch.stack(pairs).mean(dim=0).tolist()
    recall = torch.stack(shares).mean(dim=0).tolist()
    return (
        Overlap(settings.k, tuple(tuple(row) for row in overlap)),
        {k: tuple(row) for k, row in zip(ks, recall, strict=True)},
    )
