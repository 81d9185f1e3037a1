"""Lists arguments that may still be given by position, for one version."""

import sys

from kvpolicy.renamed import by_name

# Their order in the earlier signature of each class.
EARLIER = {
    "AdaKV": "retention_rate window_size kernel_size floor",
    "AdaptiveHeadSelector": "retention_rate window_size retention_tokens floor",
    "AgreementPropagation": "tsp_rate window_size tsp_tokens",
    "BlockMassPropagation": "tsp_layers mass chunk_size protect window_size",
    "BlockProductScorer": "window_size chunk_size block_chunks",
    "CAOTEScorer": "scorer fast",
    "CLAA": "tsp_layer retention_rate window_size kernel_size voting_layers "
    "whole_layers standardize",
    "CURScorer": "num_sinks local_size",
    "ChunkAttentionScorer": "num_sinks window_size chunk_size kernel_size",
    "ChunkKV": "retention_rate window_size kernel_size chunk_size",
    "ChunkMeanScorer": "scorer chunk_size",
    "Compactor": "retention_rate window_size num_sinks blending chunk_size sketch_size seed",
    "CriticalKV": "retention_rate window_size kernel_size first_share epsilon",
    "CriticalSelector": "selector first_share epsilon",
    "CrossLayerPropagation": "tsp_layer tsp_rate window_size tsp_tokens",
    "CurDKV": "retention_rate window_size num_sinks local_size",
    "ExpectedAttention": "retention_rate window_size num_sinks future_len epsilon",
    "ExpectedAttentionScorer": "num_sinks future_len epsilon by_value",
    "FastKV": "tsp_layer tsp_rate retention_rate window_size kernel_size",
    "FastV": "tsp_layer tsp_rate",
    "FirstLayersWholeSelector": "selector whole_layers",
    "FirstTokensWholeSelector": "selector whole_tokens",
    "GQAGroupSelector": "retention_rate window_size retention_tokens",
    "GemFilter": "filter_layer retention_rate kernel_size",
    "GlobalThresholdSelector": "retention_rate window_size retention_tokens",
    "H2O": "retention_rate window_size",
    "KVzip": "retention_rate chunk_size num_sinks window_size",
    "KeyDiff": "retention_rate window_size",
    "KeyNorm": "retention_rate window_size",
    "LagKV": "retention_rate window_size num_sinks lag_size",
    "LagKVScorer": "num_sinks lag_size",
    "LastQueryProductScorer": "kernel_size own",
    "LazyLLM": "tsp_rate tsp_layers",
    "LeverageScorer": "num_sinks window_size sketch_size seed",
    "PromptDistill": "tsp_layer tsp_rate kernel_size",
    "PyramidInfer": "recent_rate decay_ratio distance_weight num_sinks min_context",
    "PyramidKV": "retention_rate window_size kernel_size beta",
    "PyramidPropagation": "recent_rate decay_ratio protect min_context",
    "PyramidSelector": "retention_rate window_size retention_tokens beta",
    "RKV": "retention_rate window_size kernel_size importance",
    "Random": "retention_rate window_size seed",
    "RandomScorer": "seed",
    "RedundancyScorer": "window_size kernel_size importance threshold",
    "RestartPropagation": "filter_layer retention_rate retention_tokens",
    "SinkAndRecentSelector": "retention_rate num_sinks retention_tokens",
    "SlimInfer": "tsp_rate window_size chunk_size block_chunks",
    "SnapKV": "retention_rate window_size kernel_size",
    "SpireKV": "tsp_layer retention_rate window_size kernel_size beta",
    "StreamingLLM": "retention_rate num_sinks",
    "SumScorer": "scorers weights",
    "TOVA": "retention_rate window_size",
    "TokenSelectivePropagation": "tsp_layer tsp_rate window_size tsp_tokens",
    "UniPrefill": "tsp_layers mass chunk_size num_sinks window_size",
    "VisualTokenPropagation": "tsp_layer tsp_rate window_size",
    "WeightedTailScorer": "recent_rate distance_weight",
    "WindowAttentionScorer": "window_size kernel_size",
    "WindowMaxPoolScorer": "window_size kernel_size",
    "WindowMeanPoolScorer": "window_size kernel_size",
}


def accept_positions(module: str) -> None:
    """Let the policies and parts of a module accept their earlier positional arguments.

    Args:
        module: The ``__name__`` of the module that has the classes of `EARLIER`.
    """
    for name, order in EARLIER.items():
        by_name(order)(getattr(sys.modules[module], name))
