"""Tell if two models are the same one, even if they were loaded in different ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

# How many values of every parameter are compared.
SAMPLE = 64
# The precisions in which values are compared; in others, weights are quantised.
PRECISIONS = {
    str(each).removeprefix("torch."): torch.finfo(each)
    for each in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_CIRCUMSTANTIAL = """
architectures chunk_size_feed_forward device_map distributed_config dtype id2label label2id
output_attentions output_hidden_states output_router_logits pretraining_tp problem_type
quantization_config return_dict tie_word_embeddings torch_dtype torchscript tp_plan tp_size
transformers_version use_bfloat16 use_cache
"""
# Settings that say how a model is loaded or used, not which model it is.
CIRCUMSTANTIAL = frozenset(_CIRCUMSTANTIAL.split())


@attrs.frozen
class Parameter:
    """A record of one model parameter: its shape, its precision and a sample of its values.

    Args:
        shape: Its axes; in a tensor-parallel model, the axes of this process's part.
        dtype: Its precision, such as ``"bfloat16"``; None if it cannot be compared, because it is
            quantised or its weights are not in memory.
        sample: ``[up to SAMPLE]`` float32, some of its values; empty if ``dtype`` is None.
    """

    shape: tuple[int, ...]
    dtype: str | None
    sample: Tensor = attrs.field(eq=False)


@attrs.frozen(eq=False)
class ModelFingerprint:
    """A fingerprint of a model, by which a saved cache tells whether it fits the model.

    The same weights in another precision, quantised or offloaded, count as the same model. Of its
    configuration are the settings that say which model it is.
    """

    config: dict[str, Any]
    parameters: dict[str, Parameter]

    @staticmethod
    @torch.no_grad()
    def of(decoder: nn.Module) -> ModelFingerprint:
        """Take the fingerprint of a model from its configuration and parameters."""
        found: dict[str, Parameter] = {}
        for prefix, module in decoder.named_modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            with _in_memory(module):
                for name, parameter in module.named_parameters(recurse=False):
                    found[f"{prefix}.{name}".lstrip(".")] = sampled(parameter)
        settings: Any = decoder.config
        named = {
            key: value
            for key, value in settings.to_dict().items()
            if key not in CIRCUMSTANTIAL
            and not key.startswith("_")
            and not key.endswith("_token_id")
        }
        return ModelFingerprint(json.loads(json.dumps(named, default=str)), found)

    def difference(self, other: ModelFingerprint) -> str | None:
        """Describe the first difference from another model's fingerprint; None if there is none."""
        keys = sorted(self.config.keys() | other.config.keys())
        unlike = [key for key in keys if self.config.get(key) != other.config.get(key)]
        if unlike:
            was, got = self.config.get(unlike[0]), other.config.get(unlike[0])
            return f"{unlike[0]} of its config was {was}, got {got}"
        names = sorted(self.parameters.keys() ^ other.parameters.keys())
        if names:
            where = "only the one" if names[0] in self.parameters else "only the other"
            return f"{where} has a parameter {names[0]}"
        for name, own, its in self._compared(other):
            if own.shape != its.shape:
                return f"{name} was of shape {list(own.shape)}, got {list(its.shape)}"
            if not _same(own, its):
                return f"the values of {name} differ"
        return None

    def is_comparable(self, other: ModelFingerprint) -> bool:
        """True if both fingerprints have known values of at least one common parameter."""
        return next(self._compared(other), None) is not None

    def _compared(self, other: ModelFingerprint) -> Iterator[tuple[str, Parameter, Parameter]]:
        for name, own in self.parameters.items():
            its = other.parameters.get(name)
            if its is not None and own.dtype is not None and its.dtype is not None:
                yield name, own, its

    def packed(self) -> tuple[str, Tensor]:
        """Return the fingerprint as a JSON string and one tensor of samples; see `unpacked`."""
        each = [
            [name, own.shape, own.dtype, len(own.sample)] for name, own in self.parameters.items()
        ]
        samples = [own.sample for own in self.parameters.values()]
        text = json.dumps({"config": self.config, "parameters": each})
        return text, torch.cat([torch.empty(0), *samples])

    @staticmethod
    def unpacked(text: str, samples: Tensor) -> ModelFingerprint:
        """Build a fingerprint from the string and the tensor that `packed` returned."""
        read = json.loads(text)
        parts = torch.split(samples, [count for *_, count in read["parameters"]])
        parameters = {
            name: Parameter(tuple(shape), dtype, part)
            for (name, shape, dtype, _), part in zip(read["parameters"], parts, strict=True)
        }
        return ModelFingerprint(read["config"], parameters)


def _identifies(key: str) -> bool:
    return not (key in CIRCUMSTANTIAL or key.startswith("_") or key.endswith("_token_id"))


def _in_memory(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context manager that brings weights into memory that Accelerate has offloaded."""
    away = any(each.is_meta for each in module.parameters(recurse=False))
    if not away or not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    aligned: AbstractContextManager[Any] = align_module_device(module, torch.device("cpu"))
    return aligned


def sampled(parameter: Tensor) -> Parameter:
    """Return the record of one parameter of a model."""
    if hasattr(parameter, "to_local"):
        parameter = parameter.to_local()
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    # Quantised weights are tensors of another class, or integers.
    plain = type(parameter) in (Tensor, nn.Parameter) and dtype in PRECISIONS
    if not plain or parameter.is_meta or not parameter.numel():
        return Parameter(shape, None, torch.empty(0))
    flat = parameter.detach().flatten()
    sample = flat[:: max(len(flat) // SAMPLE, 1)][:SAMPLE]
    return Parameter(shape, dtype, sample.to(dtype=torch.float32, device="cpu", copy=True))


def _same(own: Parameter, its: Parameter) -> bool:
    """True if two samples of a parameter agree up to rounding to their dtypes or to bfloat16."""
    one, other = own.sample, its.sample
    near = one == other
    if own.dtype != its.dtype:
        limits = [PRECISIONS[str(each.dtype)] for each in (own, its)]
        share = sum(each.eps / 2 for each in limits) * 1.01
        step = sum(each.eps * each.smallest_normal for each in limits)  # near 0
        near = (one - other).abs() <= share * torch.maximum(one.abs(), other.abs()) + step
    alike = one.to(torch.bfloat16) == other.to(torch.bfloat16)
    return bool((near | alike | (one.isnan() & other.isnan())).all())
