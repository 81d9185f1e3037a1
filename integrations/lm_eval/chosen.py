"""Build the policy that the harness's model arguments name, and check the other arguments."""

import inspect
from collections.abc import Mapping
from typing import Any

from lm_eval.models.huggingface import HFLM

from kvpolicy.assignments import PartOption
from kvpolicy.checks import check_kind
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import PARTS, build_policy, compose, factory_of, parameters_of, registered


def chosen_policy(
    policy: CachePolicy | str | None, parts: Mapping[str, str | None], arguments: Mapping[str, Any]
) -> tuple[CachePolicy, dict[str, Any]]:
    """Build the policy that the harness's model arguments name; return the other arguments too.

    ``parts`` are by kind a composition's parts, such as ``"window_max_pool:window_size=16"``, None
    where none is named; ``arguments`` are all others, of the policy and of the model. Without a
    policy and parts it is the full context.
    """
    named = {kind: PartOption.parse(text, kind) for kind, text in parts.items() if text is not None}
    if policy is not None and named:
        raise ValueError(
            f"policy must be None if parts of a composed policy are given ({', '.join(named)}), "
            f"got {policy}"
        )
    taken = _taken(policy, named)
    own = {name: value for name, value in arguments.items() if name in taken}
    rest = {name: value for name, value in arguments.items() if name not in taken}
    for name in rest.keys() & _all_parameters() - parameters_of(HFLM.__init__).keys():
        raise ValueError(
            f"{name} must be a parameter of the policy, got {policy or 'a composition'}, which "
            f"takes {', '.join(taken) or 'none'}"
        )
    if named:
        return compose(named, own), rest
    if isinstance(policy, CachePolicy):
        return policy, rest
    return build_policy(policy or "full_context", **own), rest


def _taken(policy: CachePolicy | str | None, parts: Mapping[str, PartOption]) -> dict[str, Any]:
    """Return the parameters, with defaults, that a policy or a composition of parts takes."""
    if parts:
        factories = [factory_of(parts[k].name if k in parts else PARTS[k], k) for k in PARTS]
        return {name: each for part in factories for name, each in parameters_of(part).items()}
    if isinstance(policy, CachePolicy):
        return {}
    check_kind("policy", policy or "", str)
    return parameters_of(factory_of(policy or "full_context"))


def _all_parameters() -> set[str]:
    return {name for each in registered().values() for name in parameters_of(each)}


def check_model_arguments(arguments: Mapping[str, Any], *, loaded: bool) -> None:
    """Check the arguments left for `HFLM`, which would silently ignore unknown ones.

    If the model is given ``loaded``, none are for loading it.
    """
    known = inspect.signature(HFLM.__init__).parameters
    unknown = [name for name in arguments if name not in known]
    if loaded and unknown:
        raise ValueError(
            f"{', '.join(unknown)} must be an argument of the policy or of HFLM, which takes "
            f"{', '.join(name for name in known if name not in ('self', 'kwargs'))}"
        )
    if str(arguments.get("batch_size", 1)).startswith("auto"):
        raise ValueError(
            "batch_size must be an int, got auto, which measures what fits into memory without "
            "the policy"
        )
    if arguments.get("backend", "default") == "seq2seq":
        raise ValueError("backend must be causal, got seq2seq: policies work only for decoders")
