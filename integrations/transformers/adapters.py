"""Adapters of PEFT around a model: those that go with a policy, and those that cannot."""

from __future__ import annotations

from typing import Any

from kvpolicy.errors import UnsupportedModelError

# They put a cache of their own, filled with what they have learnt, in the place of the caller's.
CACHES_OF_THEIR_OWN = ("PREFIX_TUNING", "CARTRIDGE")


def check_adapters(model: Any) -> None:
    """Check that no adapter of a model would put another cache in the place of a `PolicyCache`.

    Args:
        model: A model, or a ``PeftModel`` around one.

    Raises:
        UnsupportedModelError: One would.
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
                "generates from a cache of its own, and no policy would act; adapters in the "
                "layers (LoRA and its kind) and PROMPT_TUNING work"
            )
