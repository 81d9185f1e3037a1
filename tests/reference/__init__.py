"""A second, slow implementation of all methods: plain loops over layers, one row at a time.

The reference is written from the description of the methods, not from the library. The two share no
code, so they agree only where both follow the description.
"""

# ruff: noqa: F401 (the names are those of the package)

from .anomaly import NestedKV
from .dense import Act, visible_after
from .droppers import CLAA, LazyLLM, PromptDistill, SlimInfer, UniPrefill
from .family_dense import dense_masked_logits
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
from .scored_methods import H2O, RKV, TOVA, KeyDiff, Scored
from .staged import Staged
from .together import Repeat, Together, TogetherState
