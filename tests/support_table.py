"""What docs/kinds.md says of model families, made from what `make families` has found.

``python -m tests.support_table`` writes it into the page, between two marks.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from tests.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "kinds.md"
BEGIN, END = "<!-- families: written by tests/support_table.py -->\n", "<!-- end -->\n"

RIGHT = "Every policy, also with padded rows"
# Of attention that shows no queries: without padding, and with.
UNSEEN = (
    "Policies that need no queries, rows without padding",
    "Policies that need no queries, also with padded rows",
)
# What the outcomes say, in a few words; the first that is found in a reason.
REASONS = (
    ("rows must not be padded", "Every policy, rows without padding"),
    ("once for a token", "Refused: layers run several times for each token"),
    ("of columns", "Refused: attention depends on columns of the input, which a policy changes"),
    (
        "depend on the columns",
        "Refused: attention depends on columns of the input, which a policy changes",
    ),
    (
        "must take a cache of Transformers",
        "Refused: the model takes no cache of Transformers' kind",
    ),
    (
        "one hidden state for each token",
        "Refused: the decoder's layers get no hidden state for each token",
    ),
    ("FastKV", "Policies that evict; policies that drop tokens are refused"),
    ("some layer must hold", "Refused: no layer attends, so there is nothing to choose"),
    ("keeps it in the model itself", "Refused: the model keeps its states outside the cache"),
    ("compressed attention", "Refused: a cache entry holds several compressed tokens"),
    ("reference window", "Refused: the answer sees the whole prompt, but only a window of itself"),
    ("sparse", "Refused: attention is sparse by blocks"),
    ("self-check found", "Refused: the self-check finds different logits"),
    ("text alone", "Not checked: the model cannot read a prompt without an image"),
    ("pixel_values", "Not checked: the model cannot read a prompt without an image"),
)
# Some that a reader looks for first.
_KNOWN = """
llama mistral mixtral qwen2 qwen2_moe qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl gemma2 gemma3
gemma3_text gemma4 phi3 olmo2 gpt_oss glm4 glm4_moe granite deepseek_v3 deepseek_v32 kimi_k25
minimax_m2 nemotron_h lfm2 smollm3 llava mllama gpt2
"""
KNOWN = _KNOWN.split()


def outcomes() -> list[dict[str, Any]]:
    """What was found, build by build."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [each for each in found if each["outcome"] != "unbuilt"]


def groups() -> dict[str, list[str]]:
    """Names of builds by what can be done with them, all that are right first."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in outcomes():
        if each["outcome"] == "right":
            found[RIGHT].append(each["name"])
            continue
        reason = re.sub(r"^\[[^]]*\] ", "", each["reason"])
        said = _without_queries(each["policies"].values())
        said = said or next((words for part, words in REASONS if part in reason), None)
        found[said or f"{each['outcome']}: {textwrap.shorten(reason, 80)}"].append(each["name"])
    order = [RIGHT, *UNSEEN, *dict.fromkeys(words for _, words in REASONS)]
    return {said: found[said] for said in [*order, *sorted(set(found) - set(order))] if found[said]}


def _without_queries(found: Collection[str]) -> str | None:
    """What works where attention shows no queries; None where it does or nothing works."""
    if not any("shows no queries" in each for each in found) or "right" not in found:
        return None
    return UNSEEN[not any("rows must not be padded" in each for each in found)]


def support_table() -> str:
    """Markdown: how many builds, what works with them, and their names."""
    rows = []
    for said, names in groups().items():
        who = "all others" if said == RIGHT else ", ".join(sorted(names))
        rows.append(f"| {len(names)} | {said} | {who} |")
    return "\n".join(["| builds | what works | families |", "|---|---|---|", *rows])


def page() -> str:
    """The page, with what it says of families made anew."""
    found = groups()
    assert set(KNOWN) <= set(found[RIGHT])
    opening = (
        "For each family of models a tiny model with random weights, a *build*, was compared with "
        "its own dense attention, under `FullContext`, `StreamingLLM`, `SnapKV` and `FastKV`, with "
        "one row and with two rows of which one is left-padded, and vision-language models with "
        f"images too. Of {len(outcomes())} builds (20 are variants of others), {len(found[RIGHT])} "
        "work with every policy. *Refused* means that `PolicyCache` raises an error. `make "
        "families` repeats this; [families.json](../benchmarks/results/families.json) has the "
        "outcome of every build."
    )
    lines = [
        textwrap.fill(opening, 120),
        "",
        support_table(),
        "",
        textwrap.fill(
            f"Well-known families among the {len(found[RIGHT])}: {', '.join(sorted(KNOWN))}.",
            120,
            break_on_hyphens=False,
        ),
        "",
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(["", *lines]) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
