"""Parts can be held against the contract where hypothesis is not installed."""

from tests.processes import python

BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hypothesis":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import attrs, torch
torch.set_num_threads(1)
from kvpolicy.policies import GQAGroupSelector, TokenSelectivePropagation, WindowMaxPoolScorer
from kvpolicy.testing import (
    check_propagation, check_scorer, check_selector, layer_contexts, saliencies
)
from kvpolicy.testing.draws import FixedDraws
from kvpolicy.testing.strategies import draw_context

class Doubled(WindowMaxPoolScorer):
    def score(self, context):
        saliency = super().score(context)
        return saliency * context.batch

class Flipped(GQAGroupSelector):
    def select(self, saliency, context):
        return super().select(saliency, context).flip(-1)

class PassesAll(TokenSelectivePropagation):
    def propagate(self, saliency, context):
        return None

def message(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (AssertionError, ImportError) as error:
        return str(error)
    return "nothing"

"""
SCRIPT = """
print(message(check_scorer, WindowMaxPoolScorer(3)))
print(message(check_selector, *(GQAGroupSelector(rate, window_size=2) for rate in (0.3, 0.4))))
print(message(check_propagation, TokenSelectivePropagation(tsp_rate=0.3, window_size=2)))
print(message(check_scorer, Doubled(3)))
print(message(check_selector, Flipped(0.3, window_size=2)))
print(message(check_propagation, PassesAll(tsp_rate=0.3, window_size=2)))
print(message(check_scorer, WindowMaxPoolScorer(3), shrink=True))
print(message(layer_contexts))
print(message(saliencies, draw_context(FixedDraws(0))))
print(any(name.split(".")[0] == "hypothesis" for name in sys.modules))
"""


def test_what_the_checks_say_where_hypothesis_cannot_be_imported() -> None:
    """Right parts pass, broken ones are found, and what needs hypothesis names the extra."""
    said = python("-W", "error", "-c", BLOCKED + SCRIPT).stdout.splitlines()
    assert said[:3] == ["nothing"] * 3
    assert "a padded row must get the same saliency as without padding" in said[3]
    assert "indices must be ascending" in said[4]
    assert "tokens may go on, but propagate returned None" in said[5]
    for name, found in zip(("shrink=True", "layer_contexts", "saliencies"), said[6:9], strict=True):
        assert found.startswith(f"{name} needs hypothesis")
        assert "pip install 'kvpolicy[test]'" in found
    assert said[9:] == ["False"]
