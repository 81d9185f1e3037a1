"""Load a model and its tokenizer, with clear error messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvpolicy.evaluation.default_model import HUB_NAME, default_model
from kvpolicy.evaluation.defaults import DTYPE_NAMES
from kvpolicy.evaluation.model_names import check_model_name
from kvpolicy.evaluation.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
DEFAULT_NAME = HUB_NAME.rpartition("/")[2]
"""The name of the model that is measured by default."""
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError)


@attrs.frozen(eq=False)
class Loaded:
    """A model in evaluation mode, with its tokenizer, and the name that it was asked for by."""

    name: str
    model: PreTrainedModel
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """The name of the model's dtype, such as ``"float32"``."""
        return str(self.model.dtype).removeprefix("torch.")


def load(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress = silent,
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name: A folder, or a name on the Hugging Face Hub; None for `default_model`.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``"auto"`` for the checkpoint's own.
        device: As torch names it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        progress: Told of a default model that is converted.

    Raises:
        ValueError: The dtype or device is unknown, or there is no such model; says what was tried.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    target = _check_device(device)
    if name is None:
        folder = default_model(progress)
        found = _from_pretrained(str(folder), DTYPES.get(dtype, "auto"), target)
        return attrs.evolve(found, name=DEFAULT_NAME)
    return _from_pretrained(name, DTYPES.get(dtype, "auto"), target)


def _from_pretrained(name: str, dtype: torch.dtype | str, device: torch.device) -> Loaded:
    place = check_model_name(name)
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    try:
        config = AutoConfig.from_pretrained(place)  # without a network this fails in half the time
        tokenizer = AutoTokenizer.from_pretrained(place)
        known = type(config) in AutoModelForCausalLM._model_mapping
        auto = AutoModelForCausalLM if known else AutoModelForImageTextToText
        model = auto.from_pretrained(place, dtype=dtype)
    except _LOADING_ERRORS as error:
        where = name if Path(name).is_dir() else f"{name} is no folder here, and from the Hub it"
        said = " ".join(str(error).split())
        raise ValueError(f"model {where} could not be loaded: {said}") from error
    return Loaded(name, model.to(device).eval(), tokenizer)


def _check_device(device: str) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        # The first line of torch's message says what is wrong; the others show its own code.
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device must be one torch can use here, got {device!r}: {reason}"
        ) from None
    if target.type == "meta":
        raise ValueError("device must be one that holds numbers, got 'meta'")
    return target
