"""Property tests that any scorer, selector or propagation policy must pass.

One line in a test runs the contract on a component; a failure shows the smallest layer that
breaks it::

    from kvpolicy.testing import check_scorer

    def test_my_scorer():
        check_scorer(MyScorer())

Needs hypothesis (``pip install kvpolicy[test]``). How many examples are tried is the loaded
hypothesis profile's ``max_examples``. What the contract holds: the shapes, dtypes and order that
`kvpolicy.interfaces` states; nothing given is modified; a row that is padded gets what it gets
alone, also where its heads hold unlike numbers of tokens; exactly the budget is kept, the protected
tokens always among it and no dropped token more salient than a kept one that is not protected; a
larger budget only adds tokens; what a selector decides for all layers together is all of that over
layers of unlike tokens; a KV head in a process of its own, as under tensor parallelism, is
scored and keeps and passes on what it does in the whole layer.
"""

try:
    import hypothesis  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("kvpolicy.testing needs hypothesis: pip install 'kvpolicy[test]'") from error

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
