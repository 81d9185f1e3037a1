"""The tables of model families, made from what `make families` has found.

``python -m tests.support_table`` writes docs/families.md, which begins with `support_table()`.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "families.md"

RIGHT = "every policy, padded rows too"
# Of attention that shows no queries: without padding, and with.
UNSEEN = (
    "policies that ask for no queries, rows without padding",
    "policies that ask for no queries, padded rows too",
)
# What the outcomes say, in a few words; the first that is found in a reason.
REASONS = (
    ("rows must not be padded", "every policy, rows without padding"),
    ("once for a token", "refused: layers are run several times for a token"),
    ("of columns", "refused: attention counts in columns, which a policy changes"),
    ("depend on the columns", "refused: attention counts in columns, which a policy changes"),
    ("must take past_key_values", "refused: the model takes no cache of Transformers' kind"),
    ("FastKV", "policies that evict; such as drop tokens are refused"),
    ("some layer must hold", "refused: no layer attends, so that there is nothing to choose"),
    ("keeps it in the model itself", "refused: states are held in the model, not in its cache"),
    ("compressed attention", "refused: layers hold compressed tokens, several to an entry"),
    ("reference window", "refused: layers see a prompt whole, of an answer only a window"),
    ("sparse", "refused: attention is sparse by blocks"),
    ("self-check found", "refused: the self-check finds it wrong"),
    ("text alone", "not judged: the model reads no prompt without an image"),
    ("pixel_values", "not judged: the model reads no prompt without an image"),
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
    """Markdown: how many builds, which, and what works with them."""
    rows = []
    for said, names in groups().items():
        shown = [name for name in names if name in KNOWN] if said == RIGHT else names[:4]
        more = len(names) - len(shown)
        others = f" and {more} more" if more else ""
        rows.append(f"| {len(names)} | {', '.join(shown)}{others} | {said} |")
    return "\n".join(["| builds | families | what works |", "|---|---|---|", *rows])


def page() -> str:
    """The page with all names."""
    count = len(outcomes())
    lines = [
        "# Model families",
        "",
        f"Transformers makes {count} builds of decoders, 20 of them variants of others, of which a",
        "tiny random model can be made here. `make families` builds each one and holds it against",
        "its own dense attention under `FullContext`, `StreamingLLM`, `SnapKV` and `FastKV`, one",
        "row and a left-padded pair, over six decoded tokens. This page is made of what it found.",
        "",
        "No list decides: a model is taken apart into layers of known kinds, and one that is not",
        "among the tested ones is checked on itself when a cache first meets it.",
        "`kvpolicy check MODEL` shows the outcome, and [kinds of layers](kinds.md) the reasons.",
        "Vision-language models are tested with images too.",
        "",
        "## The best known",
        "",
        support_table(),
        "",
        "## All builds",
        "",
        "| builds | families | what works |",
        "|---|---|---|",
        *(
            f"| {len(each)} | {', '.join(sorted(each))} | {said} |"
            for said, each in groups().items()
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
