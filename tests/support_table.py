"""The README's table of model families, made from what the tests of the families hold.

``python -m tests.support_table`` prints it.
"""

from collections import defaultdict

from kvpolicy.integrations.transformers.model.parts import REFUSED
from tests.families import FAMILIES
from tests.integrations.model.test_families import SUPPORTED

EVERYTHING = "every policy"
SLIDING = (
    "evicting policies; layers with a sliding window keep their window, and tokens are dropped "
    "after layers without one"
)


def support_table() -> str:
    """Markdown: families and what works with them, or why nothing does."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, family in FAMILIES.items():
        if name not in SUPPORTED:
            groups[f"refused: {REFUSED[family.model_type]}"].append(name)
        elif family.window is None:
            groups[EVERYTHING].append(name)
        else:
            groups[SLIDING].append(name)
    order = [EVERYTHING, SLIDING, *sorted(set(groups) - {EVERYTHING, SLIDING})]
    rows = [f"| {', '.join(sorted(groups[verdict]))} | {verdict} |" for verdict in order]
    return "\n".join(["| families | what works |", "|---|---|", *rows])


if __name__ == "__main__":
    print(support_table())
