"""Concrete scorers, selectors and propagation policies, and the named methods made of them."""

from kvpolicy.policies.methods.ada_kv import AdaKV
from kvpolicy.policies.methods.chunk_kv import ChunkKV
from kvpolicy.policies.methods.claa import CLAA
from kvpolicy.policies.methods.compactor import Compactor
from kvpolicy.policies.methods.critical_kv import CriticalKV
from kvpolicy.policies.methods.cur_dkv import CurDKV
from kvpolicy.policies.methods.expected_attention import ExpectedAttention
from kvpolicy.policies.methods.fastkv import FastKV
from kvpolicy.policies.methods.fastv import FastV
from kvpolicy.policies.methods.full_context import FullContext
from kvpolicy.policies.methods.gem_filter import GemFilter
from kvpolicy.policies.methods.h2o import H2O
from kvpolicy.policies.methods.key_diff import KeyDiff
from kvpolicy.policies.methods.key_norm import KeyNorm
from kvpolicy.policies.methods.kvzip import KVzip
from kvpolicy.policies.methods.lag_kv import LagKV
from kvpolicy.policies.methods.lazy_llm import LazyLLM
from kvpolicy.policies.methods.nested_kv import NestedKV
from kvpolicy.policies.methods.prompt_distill import PromptDistill
from kvpolicy.policies.methods.pyramid_infer import PyramidInfer
from kvpolicy.policies.methods.pyramid_kv import PyramidKV
from kvpolicy.policies.methods.r_kv import RKV
from kvpolicy.policies.methods.random import Random
from kvpolicy.policies.methods.replay_kv import ReplayKV
from kvpolicy.policies.methods.slim_infer import SlimInfer
from kvpolicy.policies.methods.snapkv import SnapKV
from kvpolicy.policies.methods.spire_kv import SpireKV
from kvpolicy.policies.methods.streaming_llm import StreamingLLM
from kvpolicy.policies.methods.tova import TOVA
from kvpolicy.policies.methods.uni_prefill import UniPrefill
from kvpolicy.policies.propagation.agreement import AgreementPropagation
from kvpolicy.policies.propagation.block_mass import BlockMassPropagation
from kvpolicy.policies.propagation.cross_layer import CrossLayerPropagation
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.propagation.pyramid import PyramidPropagation
from kvpolicy.policies.propagation.restart import RestartPropagation
from kvpolicy.policies.propagation.staged import StagedPropagation
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.propagation.visual_tokens import VisualTokenPropagation
from kvpolicy.policies.scorers.accumulated import AccumulatedAttentionScorer
from kvpolicy.policies.scorers.anomaly import KeyAnomalyScorer
from kvpolicy.policies.scorers.block_product import BlockProductScorer
from kvpolicy.policies.scorers.chunk_attention import ChunkAttentionScorer
from kvpolicy.policies.scorers.chunks import ChunkMeanScorer
from kvpolicy.policies.scorers.expected import ExpectedAttentionScorer
from kvpolicy.policies.scorers.keys import KeyDiffScorer, KeyNormScorer
from kvpolicy.policies.scorers.lag import LagKVScorer
from kvpolicy.policies.scorers.last_query import LastQueryProductScorer, LastQueryScorer
from kvpolicy.policies.scorers.leverage import CURScorer
from kvpolicy.policies.scorers.output_change import CAOTEScorer
from kvpolicy.policies.scorers.peak import PeakAttentionScorer
from kvpolicy.policies.scorers.random import RandomScorer
from kvpolicy.policies.scorers.redundancy import RedundancyScorer
from kvpolicy.policies.scorers.replayed import ReplayedAttentionScorer
from kvpolicy.policies.scorers.sketched_leverage import LeverageScorer
from kvpolicy.policies.scorers.weighted_tail import WeightedTailScorer
from kvpolicy.policies.scorers.window import (
    WindowAttentionScorer,
    WindowMaxPoolScorer,
    WindowMeanPoolScorer,
)
from kvpolicy.policies.scorers.wrapping import ValueAwareScorer
from kvpolicy.policies.selectors.adaptive_head import AdaptiveHeadSelector
from kvpolicy.policies.selectors.critical import CriticalSelector
from kvpolicy.policies.selectors.first_layers import FirstLayersWholeSelector
from kvpolicy.policies.selectors.first_tokens import FirstTokensWholeSelector
from kvpolicy.policies.selectors.global_threshold import GlobalThresholdSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policies.selectors.keep_all import KeepAllSelector
from kvpolicy.policies.selectors.pyramid import PyramidSelector
from kvpolicy.policies.selectors.same_tokens import SameTokensSelector
from kvpolicy.policies.selectors.sink_and_recent import SinkAndRecentSelector
from kvpolicy.scorer import MaxScorer, SumScorer

__all__ = [
    "CLAA",
    "H2O",
    "RKV",
    "TOVA",
    "AccumulatedAttentionScorer",
    "AdaKV",
    "AdaptiveHeadSelector",
    "AgreementPropagation",
    "BlockMassPropagation",
    "BlockProductScorer",
    "CAOTEScorer",
    "CURScorer",
    "ChunkAttentionScorer",
    "ChunkKV",
    "ChunkMeanScorer",
    "Compactor",
    "CriticalKV",
    "CriticalSelector",
    "CrossLayerPropagation",
    "CurDKV",
    "ExpectedAttention",
    "ExpectedAttentionScorer",
    "FastKV",
    "FastV",
    "FirstLayersWholeSelector",
    "FirstTokensWholeSelector",
    "FullContext",
    "GQAGroupSelector",
    "GemFilter",
    "GlobalThresholdSelector",
    "KVzip",
    "KeepAllSelector",
    "KeyAnomalyScorer",
    "KeyDiff",
    "KeyDiffScorer",
    "KeyNorm",
    "KeyNormScorer",
    "LagKV",
    "LagKVScorer",
    "LastQueryProductScorer",
    "LastQueryScorer",
    "LazyLLM",
    "LeverageScorer",
    "MaxScorer",
    "NestedKV",
    "PassAllPropagation",
    "PeakAttentionScorer",
    "PromptDistill",
    "PyramidInfer",
    "PyramidKV",
    "PyramidPropagation",
    "PyramidSelector",
    "Random",
    "RandomScorer",
    "RedundancyScorer",
    "ReplayKV",
    "ReplayedAttentionScorer",
    "RestartPropagation",
    "SameTokensSelector",
    "SinkAndRecentSelector",
    "SlimInfer",
    "SnapKV",
    "SpireKV",
    "StagedPropagation",
    "StreamingLLM",
    "SumScorer",
    "TokenSelectivePropagation",
    "UniPrefill",
    "ValueAwareScorer",
    "VisualTokenPropagation",
    "WeightedTailScorer",
    "WindowAttentionScorer",
    "WindowMaxPoolScorer",
    "WindowMeanPoolScorer",
]
