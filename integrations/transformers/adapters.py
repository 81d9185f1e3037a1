"""Refuse adapters of PEFT with which `generate` would not use the policy's cache rightly."""

from __future__ import annotations

from typing import Any

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.surface import CACHE, names_in

# These adapters replace the caller's cache with a cache of their own, filled with learnt keys and
# values.
CACHES_OF_THEIR_OWN = ("PREFIX_TUNING", "CARTRIDGE")


def check_adapters(model: Any) -> None:
    """Check that no adapter of a model would replace a `PolicyCache` or overlook it."""
    # While a `PeftModel` generates, the model inside asks it to prepare the inputs.
    prepares = vars(model).get("prepare_inputs_for_generation")
    for each in (model, getattr(prepares, "__self__", None)):
        config = getattr(each, "active_peft_config", None)
        kind = getattr(config, "peft_type", None)
        name = str(getattr(kind, "value", kind))
        if name in CACHES_OF_THEIR_OWN:
            raise UnsupportedModelError(
                f"peft_type of the model's adapter must not be {name} with a PolicyCache: it "
                "generates with a cache of its own, on which no policy acts; use an adapter in "
                "the layers (such as LoRA), or PROMPT_TUNING"
            )
        # PEFT until 0.21 asks for the cache by its name before Transformers 5.24. It takes every
        # token of an answer for a prompt then, with any cache, and puts its virtual tokens first.
        learns = each is not model and getattr(config, "is_prompt_learning", False)
        if learns and CACHE not in names_in(prepares):
            raise UnsupportedModelError(
                f"peft_type of the model's adapter must not be {name} with these versions: PEFT "
                "does not find the cache of this Transformers, and puts its virtual tokens before "
                "every token of an answer; use an older Transformers, a newer PEFT, or an adapter "
                "in the layers (such as LoRA)"
            )
