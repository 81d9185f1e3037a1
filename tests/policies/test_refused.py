"""Arguments that policies, methods and parts refuse, and what is said of them.

Numbers of methods that are out of their range are refused in test_help.py.
"""

import pytest

from tests.policies.written import made

UNSCORED = "rereading must be None if no queries are scored"
VALUES = {
    # Budgets and rates
    "Budget(rate=0.0, name='tsp')": r"tsp_rate must be in \(0, 1\], got",
    "Budget(rate=-0.1, name='tsp')": r"tsp_rate must be in \(0, 1\], got",
    "Budget(rate=1.5, name='tsp')": r"tsp_rate must be in \(0, 1\], got",
    "Budget(rate=nan, name='tsp')": r"tsp_rate must be in \(0, 1\], got",
    "Budget(rate=inf, name='tsp')": r"tsp_rate must be in \(0, 1\], got",
    "Budget(rate=0.1, tokens=5)": "exactly one of retention_rate and",
    "Budget()": "exactly one of retention_rate and retention_tokens must be given",
    "Budget(tokens=0)": "retention_tokens must be at least 1, got 0",
    "Compactor(nan)": "retention_rate must be in",
    "SnapKV(0.2, retention_tokens=10)": (
        "exactly one of retention_rate and retention_tokens must be given, got "
        "retention_rate=0.2 and retention_tokens=10"
    ),
    "PyramidKV(0.2, retention_tokens=9)": "exactly one of retention_rate",
    "StreamingLLM(None)": "exactly one of retention_rate",
    "AdaKV(None)": "exactly one of retention_rate",
    "FastKV(tsp_rate=0.2, tsp_tokens=9)": "exactly one of tsp_rate",
    "CLAA(tsp_rate=0.2, tsp_tokens=9)": "exactly one of tsp_rate and",
    "SlimInfer(tsp_rate=0.2, tsp_tokens=9)": "exactly one of tsp_rate",
    "CrossLayerPropagation(tsp_rate=0.2, tsp_tokens=5)": "exactly one of tsp_rate and tsp_tokens",
    "AgreementPropagation(tsp_rate=0.2, tsp_tokens=3)": "tsp_tokens",
    "FastKV(retention_rate=0.3)": (
        "retention_rate must not exceed tsp_rate, .* retention_rate=0.3 and tsp_rate=0.2"
    ),
    "FastKV(tsp_tokens=5, retention_tokens=6)": (
        "retention_tokens must not exceed tsp_tokens, .* got retention_tokens=6 and"
    ),
    "CLAA(tsp_rate=0.05)": "retention_rate must not exceed tsp_rate",
    "CriticalKV(decoding=True)": "retention_tokens must be given if decoding is True",
    # Sizes
    "SnapKV(kernel_size=6)": "kernel_size must be odd, .* got 6; use 5 or",
    "FastKV(kernel_size=0)": "kernel_size must be at least 1, got 0",
    "WindowMeanPoolScorer(kernel_size=4)": "kernel_size must be odd",
    "ChunkAttentionScorer(kernel_size=2)": "kernel_size must be odd",
    "CrossLayerPropagation(kernel_size=2)": "kernel_size must be odd",
    "SameTokensSelector(0.2, kernel_size=4)": "kernel_size must be",
    "WindowAttentionScorer(0)": "window_size must be at least 1",
    "BlockProductScorer(window_size=0)": "window_size must be at least 1",
    "TokenSelectivePropagation(window_size=0)": "window_size must be at least 1, got 0",
    "VisualTokenPropagation(window_size=0)": "window_size must be at least 1",
    "AgreementPropagation(window_size=0)": "window_size",
    "PyramidSelector(window_size=-1)": "window_size must be at least 0",
    "BlockProductScorer(chunk_size=0)": "chunk_size must be at least 1",
    "ChunkMeanScorer(KeyNormScorer(), chunk_size=0)": "chunk_size must be at le",
    "ChunkAttentionScorer(chunk_size=0)": "chunk_size must be at least 1",
    "LeverageScorer(sketch_size=0)": "sketch_size must be at least 1",
    "ReplayedAttentionScorer(reach=-1)": "reach must be",
    "ReplayedAttentionScorer(sample_size=0)": "sample_size must be",
    "ExpectedAttentionScorer(future_len=0)": "future_len must be at least 1",
    # Tokens that are kept or go on
    "ExpectedAttentionScorer(num_sinks=-1)": "num_sinks must be at least 0",
    "AdaptiveHeadSelector(protect=-1)": "protect must be at least 0",
    "FirstTokensWholeSelector(whole_tokens=-1)": "whole_tokens must be at least 0, got -1",
    "FirstLayersWholeSelector(whole_layers=-1)": "whole_layers must be at",
    # Layers
    "FastV(tsp_layer=4).check_model(4)": (
        r"tsp_layer must be in \[0, 3\] for a model of 4 layers, got 4"
    ),
    "TokenSelectivePropagation(tsp_depth=1.5)": r"tsp_depth must be in \(0, 1\], got 1.5",
    "TokenSelectivePropagation(tsp_layer=3, tsp_depth=0.5)": (
        "at most one of tsp_layer and tsp_depth"
    ),
    "LazyLLM(tsp_layers=[2, 2])": "tsp_layers must be at least one",
    "LazyLLM().check_model(3)": "take a model of at least 4 layers",
    "UniPrefill(tsp_layers=())": "tsp_layers must be at least one layer",
    "UniPrefill(tsp_layers=[1, 1])": "each once, got",
    "UniPrefill(tsp_layers=[9]).check_model(4)": r"tsp_layers must be in \[0, 3\]",
    "AgreementPropagation(tsp_layers=(0, 2))": "tsp_layers must be at least 1",
    "AgreementPropagation(0.25, tsp_layers=(2, 5)).acting_layers(5)": (
        r"tsp_layers must be in \[1, 4\]"
    ),
    "CrossLayerPropagation(voting_layers=0)": "voting_layers must be at least 1, got 0",
    # Numbers of one part
    "AgreementPropagation(agreement=1.5)": "agreement",
    "CrossLayerPropagation(reduction='sum')": "reduction must be one of .*, got 'sum'",
    "AdaKV(floor=nan)": r"floor must be in \[0, 1\], got nan",
    "CriticalSelector(first_share=1.1)": r"first_share must be in \[0, 1\]",
    "CriticalSelector(epsilon=-1)": "epsilon must be at least 0",
    "ExpectedAttentionScorer(epsilon=inf)": "epsilon must be at least 0 and finite, got inf",
    "LeverageScorer(seed=-1)": "seed must be at least 0",
    "RandomScorer(seed=-1)": "seed must be at least 0, got -1",
    # Answers with a bound
    "DecodingEviction(None, GQAGroupSelector(0.2))": "must have a budget in tokens",
    "DecodingEviction(None, KeepAllSelector())": "must have a budget in tokens",
    "DecodingEviction(None, AdaptiveHeadSelector(0.2))": "must have a budget in tokens",
    "DecodingEviction(None, GQAGroupSelector(retention_tokens=9))": "needs saliency, got None",
    "DecodingEviction(WindowMaxPoolScorer(16), GQAGroupSelector(retention_tokens=64))": (
        "at least 16, the window"
    ),
    "DecodingEviction(None, SinkAndRecentSelector(retention_tokens=9), every=0)": (
        "every must be at least 1"
    ),
    "DecodingEviction(PeakAttentionScorer(), GlobalThresholdSelector(retention_tokens=9))": (
        "must choose layer by layer"
    ),
    "KVzip(decoding=9)": "decoding of KVzip must be a DecodingEviction or None",
    # A second reading
    "Repetition(chunk_size=0)": "chunk_size must be at least 1, got 0",
    "Repetition(overlap=-1)": "overlap must be at least 0, got -1",
    "Repetition(num_sinks=-1)": "num_sinks must be at least 0",
    "Repetition(unrepeated=-1)": "unrepeated must be at least 0, got -1",
    "Repetition(instruction_ids=[-4])": "every id of instruction_ids must be at least 0, got -4",
    "CachePolicy(None, KeepAllSelector(), PassAllPropagation(), rereading=Repetition())": UNSCORED,
    "CachePolicy(PeakAttentionScorer(), KeepAllSelector(), PassAllPropagation(), "
    "rereading=Repetition())": UNSCORED,
    "CachePolicy(KeyNormScorer(), GQAGroupSelector(), PassAllPropagation(), "
    "rereading=Repetition())": UNSCORED,
    "CachePolicy(PeakAttentionScorer(), GlobalThresholdSelector(0.3), "
    "TokenSelectivePropagation(tsp_layer=1), rereading=Repetition()).check_model(4)": (
        "rereading must be None if tokens are dropped"
    ),
    # What is put together
    "CachePolicy(None, GQAGroupSelector(), PassAllPropagation())": (
        "scorer must be a Scorer, since GQAGroupSelector"
    ),
    "CachePolicy(WindowMaxPoolScorer(8), GQAGroupSelector(window_size=4), PassAllPropagation())": (
        "must be at least 8, .* got 4"
    ),
    "CachePolicy(WindowMaxPoolScorer(8), GQAGroupSelector(), "
    "TokenSelectivePropagation(window_size=7))": "TokenSelectivePropagation",
    "SumScorer([])": "scorers must hold at least one Scorer",
    "SumScorer([KeyNormScorer()], weights=[1, 2])": "weights must be one for each",
    "SumScorer([KeyNormScorer()], weights=[nan])": "finite in float32, got nan",
    "SumScorer([KeyNormScorer()], weights=[-inf])": "float32, got -inf",
    "SumScorer([KeyNormScorer()], weights=[1e39])": "finite in float32, got 1e",
    "inf * KeyNormScorer()": "weights must be finite in float32, got inf",
    "StagedPropagation([])": "stages must hold at least one PropagationPolicy",
    "StagedPropagation([TokenSelectivePropagation(tsp_layer=0), RestartPropagation()])": (
        "stages must drop tokens, not restart"
    ),
    "CachePolicy(WindowMaxPoolScorer(8), KeepAllSelector(), BlockMassPropagation(window_size=1))": (
        "window_size of .* must be at least 8"
    ),
    "CachePolicy(KeyDiffScorer(), SameTokensSelector(), PassAllPropagation(), gapless=True)": (
        "gapless must be False if layers choose only after all"
    ),
}

TYPES = {
    # What is given by name only
    "FastKV(0.2, 8)": "positional arguments but 3 were given",
    "SnapKV(0.2, 8, 7, True)": "positional arguments but 5 were given",
    "SnapKV(0.2, retention_rate=0.3)": "multiple values for argument 'retention_rate'",
    "FullContext(0.2)": "takes 1 positional argument but 2 were given",
    "PyramidInfer(0.2, recent_rate=0.3)": "takes 1 positional argument but 2",
    "DecodingEviction(None, SinkAndRecentSelector(), 7)": "positional arguments but 4 were given",
    "CachePolicy(None, KeepAllSelector(), PassAllPropagation(), None)": "but 5 were given",
    "Repetition(5, 1)": "positional arguments but 3 were given",
    # Numbers
    "Budget(tokens=2.5)": "retention_tokens must be an int, got 2.5",
    "Budget(tokens=True)": "retention_tokens must be an int",
    "Budget(rate='0.1')": "retention_rate must be a number",
    "Compactor('0.1')": "retention_rate must be a number in",
    "StreamingLLM('all')": "retention_rate must be a number",
    "SnapKV(window_size=8.0)": "window_size must be an int, got 8.0",
    "FastV(tsp_layer='2')": "tsp_layer must be an int, got '2'",
    "TokenSelectivePropagation(tsp_depth='half')": "tsp_depth must be a number",
    "UniPrefill(tsp_layers=[1.5])": "tsp_layers must be an int, got 1.5",
    "BlockProductScorer(block_chunks='8')": "block_chunks must be an int",
    "ChunkMeanScorer(KeyNormScorer(), chunk_size=2.0)": "chunk_size must be an in",
    "KeyAnomalyScorer(local_size=2.5)": "local_size must be",
    "KeyAnomalyScorer(block_size=2.5)": "block_size must be",
    "ReplayedAttentionScorer(reach=1.5)": "reach must be",
    "KVzip(whole_tokens=1.5)": "whole_tokens must be an int",
    "PyramidKV(beta=2.5)": "beta must be an int, got 2.5",
    "AdaKV(floor=True)": r"floor must be a number in \[0, 1\], got True",
    "AdaKV(floor='half')": "floor must be a number",
    "ExpectedAttentionScorer(epsilon='0')": "epsilon must be a number, got '0'",
    "PyramidInfer(distance_weight='1')": "distance_weight must be a number",
    "PyramidInfer(min_context=1.5)": "min_context must be an int, got 1.5",
    "Repetition(chunk_size=1.5)": "must be an int",
    "Repetition(later_ids=['a'])": "must be an int",
    "Repetition(answer_ids=[True])": "must be an int",
    # True or False
    "LastQueryProductScorer(own=None)": "own must be a bool, got None",
    "ExpectedAttentionScorer(by_value=1)": "by_value must be a bool, got 1",
    "CAOTEScorer(LastQueryScorer(), fast=1)": "fast must be a bool, got 1",
    "SnapKV(group_first=1)": "group_first must be a bool, got 1",
    "CrossLayerPropagation(standardize=1)": "standardize must be a bool, got 1",
    # Parts
    "CachePolicy(KeyNormScorer(), GQAGroupSelector(), PassAllPropagation(), rereading=2048)": (
        "rereading must be a Repetition"
    ),
    "CachePolicy(KeyNormScorer(), GQAGroupSelector(), PassAllPropagation(), decoding=64)": (
        "decoding must be a DecodingEviction"
    ),
    "CachePolicy('scorer', GQAGroupSelector(), PassAllPropagation())": "must be a Scorer, got",
    "CachePolicy(GQAGroupSelector(), GQAGroupSelector(), PassAllPropagation())": (
        "must be a Scorer, got"
    ),
    "CachePolicy(None, WindowMaxPoolScorer(), PassAllPropagation())": "must be a KVSelector, got",
    "CachePolicy(None, SinkAndRecentSelector, PassAllPropagation())": "must be a KVSelector, got",
    "CachePolicy(None, SinkAndRecentSelector(), None)": "must be a PropagationPolicy, got",
    "DecodingEviction(SnapKV(), GQAGroupSelector(retention_tokens=9))": "scorer must be a Scorer",
    "DecodingEviction(None, SnapKV())": "selector must be a KVSelector",
    "ChunkMeanScorer('snapkv', chunk_size=2)": "scorer must be a Scorer, got 'snapkv'",
    "CAOTEScorer('h2o')": "scorer must be a Scorer, got 'h2o'",
    "MaxScorer([WindowMaxPoolScorer])": "scorer must be a Scorer",
    "ValueAwareScorer(None)": "scorer must be a Scorer, got None",
    "CriticalSelector('snapkv')": "selector must be a KVSelector",
    "FirstLayersWholeSelector(3)": "selector must be a KVSelector, got 3",
    "StagedPropagation([TokenSelectivePropagation(tsp_layer=0), None])": (
        "stages must each be a PropagationPolicy, got None"
    ),
    "StagedPropagation([TokenSelectivePropagation])": "stages must each be a PropagationPolicy",
    # Sequences
    "MaxScorer(None)": "scorers must be a sequence of Scorer, got None",
    "SumScorer(tensor(3))": "scorers must be a sequence of Scorer",
    "SumScorer([KeyNormScorer()], weights=['1'])": "weights must be numbers, got '1'",
    "SumScorer([KeyNormScorer()], weights=[True])": "weights must be numbers, got Tr",
    "SumScorer([KeyNormScorer()], weights=2)": "weights must be a sequence of num",
    "SumScorer([RandomScorer()], weights=tensor(3))": "weights must be a sequence of num",
    "StagedPropagation(TokenSelectivePropagation(tsp_layer=0))": (
        "stages must be a sequence of PropagationPolicy, got Token"
    ),
    "StagedPropagation(tensor(3))": "stages must be a sequence of Propagation",
    "UniPrefill(tsp_layers=3)": "tsp_layers must be a sequence of layer",
    "UniPrefill(tsp_layers=tensor(3))": "tsp_layers must be a sequence of layer indices",
    "KVzip(instruction_ids=3)": "instruction_ids must be a sequence of token ids",
    "Repetition(later_ids=3)": "later_ids must be a sequence of token ids, got 3",
    "Repetition(answer_ids=3)": "answer_ids must be a sequence of token ids, got 3",
}


# Operands of scorers
BESIDE = "must have a Scorer on both sides, got"
TYPES |= {
    "KeyNormScorer() + 3": rf"\+ {BESIDE} 3 .* 0\.5 \* sc",
    "3 + KeyNormScorer()": rf"\+ {BESIDE} 3 beside Key",
    "sum([KeyNormScorer(), WindowMaxPoolScorer(4)])": r"got 0 .* use SumScorer\(scorers\)",
    "KeyNormScorer() | None": rf"\| {BESIDE} None",
    "KeyNormScorer() + KeyNormScorer": r"got <class .* make one first: KeyNormScorer\(\)",
    "KeyNormScorer() | GQAGroupSelector()": r"\| must .* got GQAGroupSelector\(",
    "tensor([1.0, 1.0]) + KeyNormScorer()": rf"\+ {BESIDE} tensor",
    "KeyNormScorer() * KeyNormScorer()": (
        r"\* must have a number and a Scorer, .* add scorers by \+"
    ),
    "KeyNormScorer() * '2'": "weights must be numbers, got '2' of str",
    "True * KeyNormScorer()": "weights must be numbers, got True of bool",
}


@pytest.mark.parametrize("written", VALUES)
def test_values(written: str) -> None:
    with pytest.raises(ValueError, match=VALUES[written]):
        made(written)


@pytest.mark.parametrize("written", TYPES)
def test_types(written: str) -> None:
    with pytest.raises(TypeError, match=TYPES[written]):
        made(written)
