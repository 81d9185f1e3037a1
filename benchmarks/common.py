"""Code that the benchmarks share: random models, prompts, speed-up limits, and result files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.operations import allowed_prefill
from kvpolicy import CachePolicy, build
from kvpolicy.evaluation import ModelShape, estimate_cost, shape_of
from kvpolicy.evaluation.results import environment, write_all

# The model without kvpolicy, on the cache that Transformers itself would use.
BASELINE = "dynamic_cache"


@attrs.frozen
class ModelSpec:
    """The sizes of a Llama with random weights; prompts longer than its positions work too."""

    hidden_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int = 1024
    max_positions: int = 131072
    rope: dict[str, Any] | None = None

    def config(self) -> LlamaConfig:
        """Return the configuration; without an end token, so that decoding never stops early."""
        rope = {} if self.rope is None else {"rope_parameters": dict(self.rope)}
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_positions,
            eos_token_id=None,
            **rope,
        )

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Build the model on its device with random weights of seed 0."""
        torch.manual_seed(0)
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config(), dtype=dtype, attn_implementation="sdpa"
            )
        return model.eval()


SMALL = ModelSpec(hidden_size=256, num_layers=8, query_heads=4, kv_heads=2, intermediate_size=768)
TINY = ModelSpec(
    hidden_size=48, num_layers=4, query_heads=6, kv_heads=2, intermediate_size=80, vocab_size=97
)


def policy_of(name: str) -> CachePolicy | None:
    """Return a registered policy with its default arguments; None for ``dynamic_cache``."""
    if name == BASELINE:
        return None
    policy = build(name)
    assert isinstance(policy, CachePolicy)
    return policy


def random_prompt(vocab_size: int, context: int, batch: int = 1) -> Tensor:
    """Return token ids ``[batch, context]``, the same every time and on every machine.

    The frequency of a token falls as one over its rank, as in natural text.
    """
    drawn = torch.rand(batch, context, generator=torch.Generator().manual_seed(context))
    return (vocab_size**drawn).long() - 1


def allowed(policy: CachePolicy | None, context: int, model: PreTrainedModel) -> dict[str, float]:
    """Return the largest possible speed-ups of a policy, under a row's keys."""
    if policy is None:
        return {"prefill_allowed": 1.0, "decode_allowed": 1.0}
    shape = shape_of(model.config, dtype=model.dtype)
    return {
        "prefill_allowed": allowed_prefill(policy, model, context),
        "decode_allowed": allowed_decode(policy, shape, context, model),
    }


def allowed_decode(
    policy: CachePolicy, shape: ModelShape, context: int, model: PreTrainedModel
) -> float:
    """Return the largest speed-up of a decoded token, limited by the bytes that it reads.

    These are the keys and values kept of the prompt, and the weights without the embeddings, of
    which a token reads one row.
    """
    found = estimate_cost(policy, shape, context)
    weights = sum(each.nbytes for each in model.parameters())
    weights -= model.get_input_embeddings().weight.nbytes
    return float((weights + found.full_kv_bytes) / (weights + found.kv_bytes))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of some values."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def ratio_text(ratio: float) -> str:
    """Return a ratio as a short text.

    Example:
        >>> ratio_text(1.846), ratio_text(12.34)
        ('1.85', '12.3')
    """
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def as_json(record: dict[str, Any]) -> str:
    """Return JSON with each list of numbers on one line; raise an error for NaN."""
    text = json.dumps(record, indent=1, allow_nan=False)
    # In the text, newlines occur only between values, never inside a string.
    numbers = re.compile(r"\[\n\s+(-?\d[-+.\de]*(?:,\n\s+-?\d[-+.\de]*)*)\n\s*\]")
    return numbers.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)


def write_json(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write a record as JSON to a folder; an older file is replaced atomically."""
    write_all(folder, {name: as_json(record).encode()})


def read_json(path: Path) -> dict[str, Any]:
    """Read a record that `write_json` has written."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def facts(device: torch.device) -> dict[str, Any]:
    """Return versions and machine, with the memory and CUDA version of a GPU."""
    found = environment(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["machine"]["gpu_bytes"] = properties.total_memory
        found["versions"]["cuda"] = torch.version.cuda
    return found
