"""Models of the table of situations: one of every kind of layer, and what each refuses."""

from functools import cache

import attrs
from transformers import PreTrainedModel

from tests.integrations.fuzz.drawing import built, windowed
from tests.integrations.hybrids.models import hybrid
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.versions import NO_QUERIES

# Read by the slow reference too: shapes, with the layers' sliding windows.
WINDOWS = (None, 16, None, 16)
PLAIN: dict[str, tuple[tuple[object, ...], tuple[int | None, ...]]] = {
    "llama": (("llama", 4, (4, 2), "sdpa", 3), (None,) * 4),
    "mistral_eager": (("mistral", 4, (6, 2), "eager", 3), (None,) * 4),
    "qwen3_windows": (("qwen3", 4, (4, 2), "sdpa", 3), WINDOWS),
}


@attrs.frozen
class Refuses:
    """What is not done with a model, beyond what the rules of `table.forbidden` say."""

    policies: frozenset[str] = frozenset()  # names of policies
    # Whether it has recurrent layers, which take nothing back and skip no padding.
    states: bool = False
    chunked_drops: bool = False  # whether a prompt of which tokens are dropped must come whole
    bounds: frozenset[str] = frozenset()  # names of bounds of answers


_WINDOWS = frozenset({"gemfilter", "pyramidinfer"})
_AGAIN = frozenset({"kvzip"})
_ASKING = frozenset({"expected_attention", "criticalkv"})
_LOOKING = frozenset(
    {"snapkv", "h2o", "tova", "adakv", "fastkv", "gemfilter", "pyramidinfer"}
    | {"kvzip", "expected_attention", "criticalkv"}
)
_STATES = frozenset({"pyramidinfer"})
_WATCHING = frozenset({"sums", "last", "window", "redundancy"})
KINDS: dict[str, Refuses] = {
    "gpt_oss": Refuses(_WINDOWS),
    "gemma3_text": Refuses(_WINDOWS),
    "llama4_text_mixed": Refuses(_WINDOWS),
    "deepseek_v3": Refuses(frozenset({"criticalkv"})),
    "jetmoe": Refuses(frozenset({"criticalkv"})),
    "qwen3_next": Refuses(_STATES, states=True),
    "nemotron_h": Refuses(_STATES | _ASKING, states=True),
    "lfm2": Refuses(_STATES, states=True),
    "falcon_h1": Refuses(_STATES | _AGAIN, states=True, chunked_drops=True),
    "inkling_text": Refuses(
        _STATES | _AGAIN | _ASKING | {"gemfilter"}, states=True, chunked_drops=True
    ),
    "gemma3n_text": Refuses(_WINDOWS | _AGAIN, chunked_drops=True),
    "gpt2": Refuses(_ASKING, chunked_drops=True),
    "deepseek_v32": Refuses(_AGAIN | {"criticalkv"}, chunked_drops=True),
    "hy_v4": Refuses(_AGAIN | _ASKING | {"pyramidinfer"}, chunked_drops=True),
    "bert": Refuses(_ASKING),
    "gptj": Refuses(_LOOKING, bounds=_WATCHING)
    if NO_QUERIES
    else Refuses(frozenset({"expected_attention"})),
    "falcon": Refuses(_LOOKING, bounds=_WATCHING),
}
KINDS = {name: kind for name, kind in KINDS.items() if name in builds()}


@cache
def model_of(name: str) -> PreTrainedModel:
    if name not in PLAIN:
        return hybrid(name)
    shape, windows = PLAIN[name]
    return windowed(shape, windows) if any(windows) else built(*shape)  # type: ignore[arg-type]


@cache
def weights_of(name: str) -> PreTrainedModel:
    """The same model without windows, for the slow reference."""
    return built(*PLAIN[name][0])  # type: ignore[arg-type]
