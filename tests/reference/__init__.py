"""A second, slow implementation of all methods: plain loops over layers, one row at a time.

The reference is written from the description of the methods, not from the library. The two share no
code, so they agree only where both follow the description.
"""

from .anomaly import NestedKV
from .dense import Act, causal_visible, dense_masked_logits, visible_after
from .droppers import CLAA, LazyLLM, PromptDistill, SlimInfer, UniPrefill
from .gapless import GaplessState
from .gem_filter import GemFilter
from .generation import ReferenceState, TurnResult
from .head_budgets import AdaKV
from .layer_budgets import PyramidKV, SpireKV
from .methods import FastKV, FullContext, Method, SnapKV, StreamingLLM
from .models import FAMILIES, PAD_TOKEN_ID, VOCAB_SIZE, Family, random_tokens, tiny_model
from .pyramid import PyramidInfer
from .query_agnostic import Compactor, CriticalKV, ExpectedAttention
from .replayed import DroppingReplay, Replay
from .runs import ChunkKV, LagKV
from .scored_methods import H2O, TOVA, KeyDiff, Scored
from .staged import Staged
from .together import Repeat, Together, TogetherState

__all__ = [
    "CLAA",
    "FAMILIES",
    "H2O",
    "PAD_TOKEN_ID",
    "TOVA",
    "VOCAB_SIZE",
    "Act",
    "AdaKV",
    "ChunkKV",
    "Compactor",
    "CriticalKV",
    "DroppingReplay",
    "ExpectedAttention",
    "Family",
    "FastKV",
    "FullContext",
    "GaplessState",
    "GemFilter",
    "KeyDiff",
    "LagKV",
    "LazyLLM",
    "Method",
    "NestedKV",
    "PromptDistill",
    "PyramidInfer",
    "PyramidKV",
    "ReferenceState",
    "Repeat",
    "Replay",
    "Scored",
    "SlimInfer",
    "SnapKV",
    "SpireKV",
    "Staged",
    "StreamingLLM",
    "Together",
    "TogetherState",
    "TurnResult",
    "UniPrefill",
    "causal_visible",
    "dense_masked_logits",
    "random_tokens",
    "tiny_model",
    "visible_after",
]
