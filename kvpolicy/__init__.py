"""kvpolicy decides which tokens a language model keeps while it reads a long prompt.

A `CachePolicy` is three small strategies: a `Scorer` (how much does each token matter at this
layer?), a `KVSelector` (which keys and values does the layer keep?) and a `PropagationPolicy`
(which tokens go on to the next layer?). The methods of the literature are compositions of such
parts in `kvpolicy.policies`; `kvpolicy.integrations.transformers.PolicyCache` applies any of them.
"""

from typing import TYPE_CHECKING

from kvpolicy.lazy import lazy_names

if TYPE_CHECKING:
    from kvpolicy.budgets import Budget as Budget
    from kvpolicy.context import LayerContext as LayerContext
    from kvpolicy.decision import Decision as Decision
    from kvpolicy.decoding import DecodingEviction as DecodingEviction
    from kvpolicy.interfaces import KVSelector as KVSelector
    from kvpolicy.interfaces import PropagationPolicy as PropagationPolicy
    from kvpolicy.interfaces import Scorer as Scorer
    from kvpolicy.kinds import TokenKind as TokenKind
    from kvpolicy.layer_inputs import AttentionSettings as AttentionSettings
    from kvpolicy.layer_inputs import DecodingInputs as DecodingInputs
    from kvpolicy.layer_inputs import LayerInputs as LayerInputs
    from kvpolicy.policy import CachePolicy as CachePolicy
    from kvpolicy.registry import build as build
    from kvpolicy.registry import registered as registered
    from kvpolicy.repetition import Repetition as Repetition
    from kvpolicy.rotary import RotaryEmbedding as RotaryEmbedding
else:
    __getattr__, __dir__, __all__ = lazy_names(
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
