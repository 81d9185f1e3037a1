"""kvpolicy decides which tokens a language model keeps while it reads a long prompt.

A `CachePolicy` is three small strategies: a `Scorer` (how much does each token matter at this
layer?), a `KVSelector` (which keys and values does the layer keep?) and a `PropagationPolicy`
(which tokens go on to the next layer?). The methods of the literature are compositions of such
parts in `kvpolicy.policies`; `kvpolicy.integrations.transformers.PolicyCache` applies any of them.
"""

from typing import TYPE_CHECKING

from kvpolicy.lazy import lazy_names

if TYPE_CHECKING:
    from kvpolicy.budgets import Budget
    from kvpolicy.context import LayerContext
    from kvpolicy.decision import Decision
    from kvpolicy.decoding import DecodingEviction
    from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
    from kvpolicy.kinds import TokenKind
    from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs, LayerInputs
    from kvpolicy.policy import CachePolicy
    from kvpolicy.registry import build, registered
    from kvpolicy.repetition import Repetition
    from kvpolicy.rotary import RotaryEmbedding
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvpolicy.budgets": ("Budget",),
            "kvpolicy.context": ("LayerContext",),
            "kvpolicy.decision": ("Decision",),
            "kvpolicy.decoding": ("DecodingEviction",),
            "kvpolicy.interfaces": ("KVSelector", "PropagationPolicy", "Scorer"),
            "kvpolicy.kinds": ("TokenKind",),
            "kvpolicy.layer_inputs": ("AttentionSettings", "DecodingInputs", "LayerInputs"),
            "kvpolicy.policy": ("CachePolicy",),
            "kvpolicy.registry": ("build", "registered"),
            "kvpolicy.repetition": ("Repetition",),
            "kvpolicy.rotary": ("RotaryEmbedding",),
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AttentionSettings",
    "Budget",
    "CachePolicy",
    "Decision",
    "DecodingEviction",
    "DecodingInputs",
    "KVSelector",
    "LayerContext",
    "LayerInputs",
    "PropagationPolicy",
    "Repetition",
    "RotaryEmbedding",
    "Scorer",
    "TokenKind",
    "build",
    "registered",
]
