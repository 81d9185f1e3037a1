"""Count the bytes of a model's released weights, quantised if its configuration says so.

A checkpoint's ``quantization_config`` names a method, its numbers and the modules that are left as
they are. The methods here store each matrix by itself, so that the bytes of a model follow from the
shapes of its matrices. Of other methods the bytes are not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import attrs
from torch import Tensor, nn

from kvpolicy.integrations.transformers.model.finding import find_decoder, layers_within

# Bytes of a matrix with so many rows (outputs) and columns (inputs).
Packed = Callable[[int, int], int]


@attrs.frozen
class Weights:
    """The bytes of a model's weights.

    Args:
        bytes: Of all parameters and buffers.
        parameters: How many numbers these are.
        method: By what some of them are quantised, such as ``"MXFP4"``; None if by nothing.
        quantised: How many of them are.
        quantised_bytes: The bytes of these, their scales among them.
    """

    bytes: int
    parameters: int = 0
    method: str | None = None
    quantised: int = 0
    quantised_bytes: int = 0


@attrs.frozen
class Method:
    """A way to quantise weights: the bytes that a matrix takes, and the modules left unquantised.

    Args:
        name: What to call it.
        packed: The bytes of a matrix.
        skips: True of the name of a module that is left as it is.
        linear: Whether linear layers are quantised.
        experts: Whether matrices of experts are; None if that cannot be told.
    """

    name: str
    packed: Packed
    skips: Callable[[str], bool]
    linear: bool = True
    experts: bool | None = True


def released_weights(model: nn.Module, config: Any, name: str) -> Weights:
    """Count the bytes of a model's weights as its configuration says they are stored.

    Args:
        model: The model on the `meta` device, unquantised.
        config: Its configuration.
        name: What to call it in messages.

    Raises:
        ValueError: The configuration says that weights are quantised in a way that is not known
            here; names ``--weights``.
    """
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    total = sum(each.numel() for each in tensors.values())
    method = method_of(config, name)
    sizes = {key: each.numel() * each.element_size() for key, each in tensors.items()}
    if method is None:
        return Weights(sum(sizes.values()), total)
    quantised, packed_bytes = 0, 0
    for tensor, matrices in _matrices(model, method, name):
        sizes[id(tensor)] = sum(method.packed(rows, columns) for rows, columns in matrices)
        quantised += tensor.numel()
        packed_bytes += sizes[id(tensor)]
    return Weights(sum(sizes.values()), total, method.name, quantised, packed_bytes)


def _matrices(
    model: nn.Module, method: Method, name: str
) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Yield the quantised weights, each with the matrices that are stored for it."""
    layers = {id(it) for layer in layers_within(find_decoder(model)) for it in layer.modules()}
    for path, module in model.named_modules():
        if id(module) not in layers or method.skips(path):  # not embeddings or the head
            continue
        if isinstance(module, nn.Linear):
            if method.linear:
                yield module.weight, [(module.out_features, module.in_features)]
            continue
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim != 3 or own.endswith("bias") or isinstance(module, nn.Conv1d):
                continue
            if method.experts is None:
                raise _not_known(name, f"{method.name}, of a mixture of experts")
            experts, rows, columns = weight.shape
            if getattr(module, "is_transposed", False):
                rows, columns = columns, rows
            # Gate and up projections are one tensor here, but two in the released files.
            parts = 2 if "gate_up" in own else 1
            yield weight, [(rows // parts, columns)] * (experts * parts)


def method_of(config: Any, name: str) -> Method | None:
    """Return how a model's weights are quantised; None if they are not quantised.

    Raises:
        ValueError: See `released_weights`.
    """
    said = _said(config)
    if said is None or said.get("dequantize"):
        return None
    kind = str(said.get("quant_method", "")).lower()
    if not kind and (said.get("load_in_4bit") or said.get("load_in_8bit")):
        kind = "bitsandbytes"
    try:
        method = METHODS[kind](said) if kind in METHODS else None
        if method is not None:
            method.packed(1, 1)  # if one number is missing, all are
    except (LookupError, TypeError, ValueError, ZeroDivisionError, re.error):
        method = None
    if method is None:
        raise _not_known(name, kind or "a method without a name")
    return method


def _said(config: Any) -> Mapping[str, Any] | None:
    for each in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            said = getattr(each, name, None)
            if said is not None:
                return said if isinstance(said, Mapping) else dict(said.to_dict())
    return None


def _not_known(name: str, kind: str) -> ValueError:
    return ValueError(
        f"--weights must be given for {name}, since its configuration says that {kind} quantises "
        "the weights, but not how many bytes they take; give the size of its files"
    )


def _leaves_out(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a test for modules that stay unquantised, by Transformers' names and patterns."""
    edge = r"(?:(?<=\.)|(?=\.|$))"

    def skips(path: str) -> bool:
        return any(
            re.match(rf"(?:{each}){edge}", name) or name.endswith(each)
            for each in patterns or ()
            for name in _names(path)
        )

    return skips


def _names(path: str) -> tuple[str, ...]:
    """Return a module's name, and its names inside models that also read images."""
    inner = path.removeprefix("model.")
    return path, f"model.language_model.{inner}", f"language_model.{path}"


def _mxfp4(said: Mapping[str, Any]) -> Method:
    def packed(rows: int, columns: int) -> int:
        return rows * (ceil(columns / 2) + ceil(columns / 32))  # a byte of scale for 32 numbers

    skips = _leaves_out(said.get("modules_to_not_convert"))
    return Method("MXFP4", packed, skips, linear=False)


def _fp8(said: Mapping[str, Any]) -> Method | None:
    if said.get("expert_dtype", "fp8") != "fp8":
        return None
    block: Sequence[int] | None = said.get("weight_block_size")
    scale = 1 if said.get("scale_fmt") == "ue8m0" else 4

    def packed(rows: int, columns: int) -> int:
        scales = 1 if block is None else ceil(rows / block[0]) * ceil(columns / block[1])
        return rows * columns + scale * scales

    return Method("FP8", packed, _leaves_out(said.get("modules_to_not_convert")))


def _fbgemm_fp8(said: Mapping[str, Any]) -> Method:
    def packed(rows: int, columns: int) -> int:
        return rows * columns + 4 * rows

    return Method("FP8", packed, _leaves_out(said.get("modules_to_not_convert")))


def _gptq(said: Mapping[str, Any]) -> Method | None:
    bits, size = int(said["bits"]), int(said.get("group_size", 128))
    dynamic: Mapping[str, Any] = said.get("dynamic") or {}
    # For configurations in which modules differ, or only some modules are quantised.
    if said.get("lm_head") or said.get("modules_in_block_to_quantize"):
        return None
    if any(not each.startswith("-:") for each in dynamic):
        return None

    def packed(rows: int, columns: int) -> int:
        groups = _groups(columns, size)
        numbers = 4 * ceil(columns * bits / 32) * rows
        zeros = 4 * groups * ceil(rows * bits / 32)
        return numbers + zeros + 2 * groups * rows + 4 * columns  # with the group of each column

    patterns = [re.compile(each.removeprefix("-:")) for each in dynamic]
    return Method(
        f"GPTQ of {bits} bits",
        packed,
        lambda path: any(pattern.match(name) for pattern in patterns for name in _names(path)),
    )


def _awq(said: Mapping[str, Any]) -> Method:
    bits = int(said["bits"] if "bits" in said else said["w_bit"])
    size = int(said.get("group_size", said.get("q_group_size", 128)))

    def packed(rows: int, columns: int) -> int:
        groups, width = _groups(columns, size), 4 * ceil(rows * bits / 32)
        zeros = groups * width if said.get("zero_point", True) else 0
        return columns * width + zeros + 2 * groups * rows

    return Method(f"AWQ of {bits} bits", packed, _leaves_out(said.get("modules_to_not_convert")))


def _bitsandbytes(said: Mapping[str, Any]) -> Method:
    def packed(rows: int, columns: int) -> int:
        if said.get("load_in_8bit"):
            return rows * columns + 4 * rows
        blocks = ceil(rows * columns / 64)
        double = said.get("bnb_4bit_use_double_quant")
        return ceil(rows * columns / 2) + (
            blocks + 4 * ceil(blocks / 256) if double else 4 * blocks
        )

    bits = 8 if said.get("load_in_8bit") else 4
    skips = _leaves_out(said.get("llm_int8_skip_modules"))
    return Method(f"bitsandbytes of {bits} bits", packed, skips, experts=None)


def _compressed_tensors(said: Mapping[str, Any]) -> Method | None:
    (group,) = said["config_groups"].values()  # one group is for all modules
    sparse = (said.get("sparsity_config") or {}).get("format", "dense")
    if list(group["targets"]) != ["Linear"] or sparse != "dense":
        return None
    weights = group["weights"]
    bits, strategy = int(weights["num_bits"]), weights["strategy"]
    form = group.get("format") or said["format"]
    small = {"nvfp4-pack-quantized": (16, 4), "mxfp4-pack-quantized": (32, 0)}.get(form)
    if small is None and form not in ("pack-quantized", "int-quantized", "float-quantized"):
        return None

    def packed(rows: int, columns: int) -> int:
        if small is not None:  # scales of a byte, and one for the whole
            return rows * (ceil(columns / 2) + ceil(columns / small[0])) + small[1]
        if strategy == "block":
            height, width = map(int, weights["block_structure"])
            return rows * columns + 2 * ceil(rows / height) * ceil(columns / width)
        groups = _groups(columns, weights["group_size"]) if strategy == "group" else 1
        scales = 1 if strategy == "tensor" else rows * groups
        if form != "pack-quantized":
            return rows * columns + 2 * scales
        zeros = 0 if weights.get("symmetric", True) else 4 * ceil(rows * bits / 32) * groups
        return 4 * ceil(columns * bits / 32) * rows + 2 * scales + zeros + 16  # and the shape

    ignored = list(said.get("ignore") or ())
    patterns = [re.compile(each[3:]) for each in ignored if each.startswith("re:")]

    def skips(path: str) -> bool:
        return any(
            name in ignored or any(pattern.match(name) for pattern in patterns)
            for name in _names(path)
        )

    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        return None
    kind = weights.get("type", "int")
    return Method(f"{kind}{bits} (compressed-tensors)", packed, skips)


def _groups(columns: int, size: int) -> int:
    return 1 if size == -1 else ceil(columns / size)


METHODS: dict[str, Callable[[Mapping[str, Any]], Method | None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}
