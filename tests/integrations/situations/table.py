"""The table of situations: few rows, in which every two values that go together meet."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import attrs

from tests.covering import covering_pairs
from tests.integrations.situations.models import KINDS, PLAIN
from tests.integrations.situations.policies import BOUNDS, GAPLESS, POLICIES, TOGETHER


@attrs.frozen
class Situation:
    """A conversation: what is read, how, and what happens in between."""

    model: str  # one of `models.PLAIN` or `models.KINDS`
    policy: str  # one of `policies.POLICIES`
    bound: str  # by which the layers choose again in answers, one of `policies.BOUNDS`, or "none"
    rows: str  # "one", or several "alike", "padded" on the left, or with "gaps" in one
    first: str  # how the first prompt is read and answered
    storage: str  # how keys and values are held
    buffers: str  # whether memory is reserved for answers: "grown" or "reserved"
    event: str  # what happens behind the first answer
    second: str  # how a second prompt is read and answered

    def __str__(self) -> str:
        plain = {axis: values[0] for axis, values in AXES.items()}
        told = attrs.asdict(self)
        return "-".join(
            told[axis] for axis in AXES if axis in ("model", "policy") or told[axis] != plain[axis]
        ).replace(" ", "_")


# The first value of an axis is the plainest, and is left out of a situation's name.
AXES: dict[str, Sequence[str]] = {
    "model": (*PLAIN, *KINDS),
    "policy": tuple(POLICIES),
    "bound": ("none", *BOUNDS),
    "event": (
        *("nothing", "copy", "pickle", "save", "reorder", "repeat", "crop", "pause", "ended"),
        *("failed prompt", "failed step", "interrupted answer", "beams"),
    ),
    "first": ("forward", "chunks", "generate", "generate in chunks", "drafts", "embeddings"),
    "second": ("forward", "chunks", "generate", "generate in chunks", "drafts", "appended"),
    "rows": ("padded", "one", "alike", "gaps"),
    "storage": ("plain", "offloaded", "quantised"),
    "buffers": ("grown", "reserved"),
}

# Those that take whatever layer the model has for them.
OF_KINDS = frozenset(
    {"full_context", "streamingllm", "snapkv", "h2o", "tova", "keydiff", "adakv", "fastkv"}
    | {"gemfilter", "pyramidinfer", "kvzip", "expected_attention", "criticalkv"}
)
# Whose reference knows that layers hold less than there was once an answer has been bounded.
BOUNDED = OF_KINDS - {"kvzip", "expected_attention", "criticalkv"} | {"two_stages"}
ROUNDED = frozenset({"full_context", "streamingllm"})
DROPPING = frozenset(
    name for name, (policy, _) in POLICIES.items() if policy.propagation.acting_layers(4)
)
RESTARTING = frozenset(
    name for name, (policy, _) in POLICIES.items() if policy.propagation.restarts
)
# What recurrent layers do not do.
NO_STATE = {
    "event": {"crop", "pause", "ended"},
    "first": {"drafts"},
    "second": {"drafts"},
    "rows": {"gaps"},
}
SEVERAL = {"reorder", "pause"}
CHUNKED = {"chunks", "generate in chunks"}


def forbidden(row: Mapping[str, Hashable]) -> bool:
    """Returns whether some values of a row, or of a part of one, do not go together."""
    told = cast(Mapping[str, Any], row)
    model, policy = told.get("model"), told.get("policy")
    bound, storage, event = told.get("bound"), told.get("storage"), told.get("event")
    reads = {told.get("first"), told.get("second")}
    rules = (
        _model_forbids(told),
        bound not in (None, "none") and policy is not None and policy not in BOUNDED,
        bound not in (None, "none") and bool(reads & {"drafts"}),
        storage == "quantised" and policy is not None and policy not in ROUNDED,
        storage == "quantised" and bound not in (None, "none", "rolling"),
        # What chunks and drafts append is rounded before a prompt or an answer ends.
        storage == "quantised" and bool(reads & {*CHUNKED, "drafts"}),
        storage == "quantised" and event in ("beams", "pickle"),
        storage == "quantised" and model == "mistral_eager",  # whose heads no group divides
        "drafts" in reads and told.get("rows", "one") != "one",
        "drafts" in reads and event == "repeat",
        event in SEVERAL and told.get("rows") == "one",
        policy == "kvzip" and "embeddings" in reads,
        event in ("ended", "failed prompt") and told.get("second") == "appended",
        event == "beams" and bool(bound not in (None, "none")) and policy in TOGETHER,
    )
    return any(rules)


def _model_forbids(told: Mapping[str, Any]) -> bool:
    model, policy = told.get("model"), told.get("policy")
    if model is None:
        return False
    if model in PLAIN:
        if model != "qwen3_windows" or policy is None:
            return False
        layers = POLICIES[policy][0].propagation.acting_layers(4)
        return policy in RESTARTING or bool(layers - {0, 2}) or policy in (*GAPLESS, *TOGETHER)
    kind = KINDS[model]
    drops = policy in DROPPING
    reads = {told.get("first"), told.get("second")}
    rules = (
        policy is not None and (policy not in OF_KINDS or policy in kind.policies),
        told.get("first") == "embeddings",
        kind.states and any(told.get(axis) in values for axis, values in NO_STATE.items()),
        kind.states
        and (drops or policy == "kvzip")
        and told.get("rows", "alike") not in ("one", "alike"),
        kind.chunked_drops and drops and bool(reads & CHUNKED),
        told.get("bound") in kind.bounds,
        told.get("rows") == "gaps",
    )
    return any(rules)


# A policy by the score of the bound: what a bounded answer leaves behind decides in a later turn.
ALIKE = {
    "none": "snapkv",
    "rolling": "streamingllm",
    "sums": "h2o",
    "last": "tova",
    "window": "snapkv",
    "unlike": "keydiff",
    "redundancy": "adakv",
}


def in_buffers() -> list[Situation]:
    """Returns, for each plain model and bound, answers into reserved buffers in two turns."""
    return [
        Situation(
            model=model,
            policy=ALIKE[bound],
            bound=bound,
            rows="alike" if bound == "last" else "padded",
            first="generate",
            storage="plain",
            buffers="reserved",
            event="crop",
            second="generate",
        )
        for model in PLAIN
        for bound in AXES["bound"]
    ]


def situations() -> list[Situation]:
    """Returns all rows of the table, each once."""
    rows = [Situation(**cast(Any, row)) for row in covering_pairs(AXES, forbidden)]
    return list(dict.fromkeys([*rows, *in_buffers()]))
