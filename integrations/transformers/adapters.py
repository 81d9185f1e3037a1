"""Refuse adapters of PEFT that replace the cache, since no policy could act then."""

from __future__ import annotations

from typing import Any

from kvpolicy.errors import UnsupportedModelError

# These adapters replace the caller's cache with a cache of their own, filled with learnt keys and
# values.
CACHES_OF_THEIR_OWN = ("PREFIX_TUNING", "CARTRIDGE")


def check_adapters(model: Any) -> None:
    """Check that no adapter of a model would replace a `PolicyCache` with its own cache.

    Args:
        model: A model, or a ``PeftModel`` around one.

    Raises:
        UnsupportedModelError: An adapter would replace it.
    """
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
