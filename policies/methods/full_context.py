"""Keeps everything: the baseline of every comparison."""

import attrs

from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.selectors.keep_all import KeepAllSelector


@documented
@attrs.frozen
class FullContext(Method):
    """Keeps everything and drops nothing: the baseline of every comparison.

    Example:
        >>> FullContext().prefill_compute_rate(num_layers=32)
        1.0
    """

    def _parts(self) -> Parts:
        return None, KeepAllSelector(), PassAllPropagation()
