"""Property tests that any scorer, selector or propagation policy must pass.

One line in a test runs the contract on a component; a failure says how the component breaks it, and
in which layer::

    from kvpolicy.testing import check_scorer

    def test_my_scorer():
        check_scorer(MyScorer())

The same few layers come first in every run. If hypothesis is installed (``pip install
'kvpolicy[test]'``) it draws more, until there are ``max_examples`` of its loaded profile;
otherwise the fixed set is longer. ``shrink=True`` looks for the smallest layer that fails.

The contract checks that:

- results have the shapes, dtypes and order that `kvpolicy.interfaces` states;
- no input is modified;
- a padded row gets the same result as the row alone, also if its heads hold different numbers of
  tokens;
- exactly the budget is kept, with all protected tokens, and no dropped token is more salient than
  a kept one that is not protected;
- a larger budget only adds tokens;
- a selector that decides for all layers together does so for layers with different tokens;
- a KV head in a process of its own, as under tensor parallelism, gets the same saliency and the
  same choice as in the whole layer.
"""

from kvpolicy.testing.checks import check_propagation, check_scorer, check_selector
from kvpolicy.testing.strategies import layer_contexts, row_alone, saliencies

__all__ = [
    "check_propagation",
    "check_scorer",
    "check_selector",
    "layer_contexts",
    "row_alone",
    "saliencies",
]
