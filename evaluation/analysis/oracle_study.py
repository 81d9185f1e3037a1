"""Compare scorers with the attention of answers, over several prompts, and write the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.checks import check_count, check_kernel_size
from kvpolicy.evaluation.analysis.oracle import (
    TOP_SHARE,
    Ranking,
    answer_attention,
    greedy_answer,
    rank_scorers,
)
from kvpolicy.evaluation.analysis.plots import plot_rankings
from kvpolicy.evaluation.analysis.settings import AnalysisSettings
from kvpolicy.evaluation.analysis.study import check, prompts_of
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.readable import positions_notes
from kvpolicy.evaluation.results import as_json, check_folder, environment, write_all
from kvpolicy.interfaces import Scorer

FILES = ("oracle.json", "oracle.png")


@attrs.frozen
class OracleSettings:
    """Settings of a study that compares scorers with an oracle, the answer's own attention.

    Args:
        analysis: The model and the prompts; the window's tokens are not ranked.
        answer_tokens: The longest answer, in tokens, at least 1.
        kernel_size: Width of the pooling of what an answer attends to, odd.
    """

    analysis: AnalysisSettings
    answer_tokens: int = 256
    kernel_size: int = 13

    def __attrs_post_init__(self) -> None:
        check_count("answer_tokens", self.answer_tokens, minimum=1)
        check_kernel_size(self.kernel_size)


@attrs.frozen
class OracleStudy:
    """Results of a study that compares scorers with an oracle, the answer's own attention.

    Args:
        settings: What was asked for.
        environment: Versions and machine.
        lengths: Tokens of each prompt.
        answers: Tokens of each answer.
        rankings: By scorer, the mean over the prompts.
        notes: What a reader has to know.
    """

    settings: OracleSettings
    environment: dict[str, Any]
    lengths: tuple[int, ...]
    answers: tuple[int, ...]
    rankings: dict[str, Ranking]
    notes: tuple[str, ...]

    @property
    def layers(self) -> list[int]:
        """The indices of the model layers at which the scorers were compared."""
        return list(next(iter(self.rankings.values())).spearman)

    def as_data(self) -> dict[str, Any]:
        """Return the study's settings and results as a dict for JSON."""
        settings = attrs.asdict(self.settings)
        files = self.settings.analysis.prompt_files
        settings["analysis"]["prompt_files"] = [str(path) for path in files]
        return {
            "settings": settings,
            **self.environment,
            "prompts": list(self.lengths),
            "answers": list(self.answers),
            "top_share": TOP_SHARE,
            "layers": self.layers,
            "scorers": {
                name: {key: list(each.values()) for key, each in attrs.asdict(ranking).items()}
                for name, ranking in self.rankings.items()
            },
            "notes": list(self.notes),
        }


def check_oracle(settings: OracleSettings, out: Path | None = None) -> list[str]:
    """Check the study's settings before a model is loaded, and read the prompt files.

    Raises:
        ValueError: See `kvpolicy.evaluation.analysis.study.check`.
        MissingExtraError: A picture is wanted and matplotlib is not installed.
    """
    if out is not None:
        check_folder(out, FILES)
        require("matplotlib", extra="plot")
    return check(settings.analysis)


def run_oracle(
    settings: OracleSettings,
    texts: Sequence[str],
    loaded: Loaded,
    scorers: Mapping[str, Scorer],
    progress: Progress = silent,
) -> OracleStudy:
    """Answer every prompt with full context, and compare all scorers with its attention.

    Args:
        settings: What is wanted.
        texts: The prompts, from `check_oracle`; none for the needle task.
        loaded: The model.
        scorers: By name.
        progress: Told how far it is.

    Raises:
        ValueError: The prompts do not fit the settings or the model.
    """
    model, window = loaded.model, settings.analysis.window_size
    kinds = prompts_of(settings.analysis, texts, loaded, answer_len=settings.answer_tokens)
    prompts = [prompt for group in kinds.values() for prompt in group]
    found: list[dict[str, Ranking]] = []
    answers = []
    for done, prompt in enumerate(prompts):
        progress("oracle", done, len(prompts))
        answer = greedy_answer(model, prompt, settings.answer_tokens)
        answers.append(len(answer))
        truth = answer_attention(model, prompt, answer, kernel_size=settings.kernel_size)
        found.append(rank_scorers(model, prompt, scorers, truth, window_size=window))
    lengths = tuple(prompt.shape[1] for prompt in prompts)
    return OracleStudy(
        settings,
        environment(model.device),
        lengths,
        tuple(answers),
        {name: _mean([each[name] for each in found]) for name in scorers},
        tuple(positions_notes(model, max(lengths))),
    )


def write_oracle(study: OracleStudy, folder: Path) -> list[str]:
    """Write the study's numbers and plot into its folder; return the files' names."""
    contents = (
        as_json(study.as_data()),
        plot_rankings(study.rankings),
    )
    write_all(folder, dict(zip(FILES, contents, strict=True)))
    return list(FILES)


def _mean(rankings: Sequence[Ranking]) -> Ranking:
    rows = [attrs.asdict(each) for each in rankings]
    return Ranking(
        **{
            key: {layer: sum(row[key][layer] for row in rows) / len(rows) for layer in rows[0][key]}
            for key in rows[0]
        }
    )
