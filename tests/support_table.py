"""The page of model families, made from what `make families` has found.

``python -m tests.support_table`` writes docs/families.md.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from tests.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "families.md"

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
# Those that a reader looks for first.
_KNOWN = """
llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text
gemma4_text phi phi3 phimoe olmo2 olmo3 olmoe gpt_oss glm4 glm4_moe minimax_m2 granite
granitemoe cohere2 exaone4 ernie4_5 hunyuan_v1_dense seed_oss smollm3 starcoder2 llava
llava_next llava_onevision qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe gemma3 gemma4 internvl
mistral3 idefics3 smolvlm glm4v aya_vision deepseek_vl deepseek_v2 deepseek_v3 kimi_k25
glm4_moe_lite mistral4 minicpm3
qwen3_next qwen3_5 nemotron_h
granitemoehybrid bamba jamba lfm2 lfm3 olmo_hybrid kimi_linear falcon_h1 zamba2 minimax
deepseek_v32 glm_moe_dsa llama4 mllama gemma3n_text gpt2 bert roberta
"""
KNOWN = _KNOWN.split()
SHOWN = (
    "llama",
    "mistral",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "llava",
)


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
    """Markdown: how many builds, what works with them, and some of their names."""
    rows = []
    for said, names in groups().items():
        shown = [name for name in names if name in SHOWN] if said == RIGHT else sorted(names)[:4]
        more = len(names) - len(shown)
        others = f" and {more} more" if more else ""
        rows.append(f"| {len(names)} | {said} | {', '.join(shown)}{others} |")
    return "\n".join(["| builds | what works | families |", "|---|---|---|", *rows])


def page() -> str:
    """The page with all names."""
    found = groups()
    known = sorted(name for name in found[RIGHT] if name in KNOWN)
    opening = (
        "Which decoders of Transformers work with kvpolicy. For each family of models a tiny model "
        f"with random weights, a *build*, was tested. Of {len(outcomes())} builds (20 are variants "
        f"of others), {len(found[RIGHT])} work with every policy. `make families` compares each "
        "build with its own dense attention under `FullContext`, `StreamingLLM`, `SnapKV` and "
        "`FastKV`, with one row and with two rows of which one is left-padded, for six decoded "
        "tokens; this page is made from its results."
    )
    checked = (
        "The code has no list of supported families: it takes a model apart into layers of known "
        "kinds. *Refused* means that `PolicyCache` raises an error; [kinds of layers](kinds.md) "
        "says why. A model that is not on this page is checked when a cache first meets it; "
        "`kvpolicy check MODEL` shows the outcome. Policies that need no queries are listed in "
        "[kinds of layers](kinds.md#why-a-cell-says-no). Vision-language models were also tested "
        "with images."
    )
    lines = [
        "# Model families",
        "",
        textwrap.fill(opening, 100),
        "",
        textwrap.fill(checked, 100),
        "",
        support_table(),
        "",
        "## Well-known families that work with every policy",
        "",
        listed(known),
        "",
        "## All builds",
    ]
    for said, names in found.items():
        lines += ["", f"### {said}", "", listed(sorted(names))]
    return "\n".join(lines) + "\n"


def listed(names: list[str]) -> str:
    return textwrap.fill(", ".join(names), 100, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
