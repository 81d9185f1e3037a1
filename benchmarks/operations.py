"""Count the operations of a prefill, which bound the speed-up that a policy can have.

A layer over ``n`` tokens takes ``2 * n`` operations for each of its weights (of experts, the active
ones), and causal attention ``n ** 2 * query_heads * (key_dim + value_dim)``: half of two full
products of two operations each. A recurrent layer takes four for each number of its state and
token; the output head sees the last token only. Norms, biases, activations, rotary embeddings and
the policy's scoring are not counted. A layer that drops tokens counts for all that reach it. As in
FastKV (arXiv 2502.01068), whose 8B model this allows 1.70, 1.76 and 1.84 at 8, 32 and 128 times
1,024 tokens.

    python benchmarks/operations.py --context N [--config NAME] [--tsp-rate RATE] [--tsp-layer L]

prints what FastKV is allowed at each length. The model's layers must see the whole prompt.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from kvpolicy import CachePolicy
from kvpolicy.evaluation import ModelShape, shape_of
from kvpolicy.evaluation.estimate.shapes import load_config
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policies import FastKV, FullContext


@attrs.frozen
class Operations:
    """Numbers of floating-point operations of a prefill; a multiply-add counts as two."""

    linear: float
    attention: float
    states: float
    head: float

    @property
    def layers(self) -> float:
        return self.linear + self.attention + self.states

    @property
    def total(self) -> float:
        return self.layers + self.head


@attrs.frozen
class LayerWork:
    """What one layer multiplies a token with: weights, of these those of queries, keys and values.

    ``pair_width`` counts the multiplications of a pair of query and key, over all heads.
    """

    weights: float
    projection_weights: float
    pair_width: int
    state_elements: int


def operations(policy: CachePolicy | None, model: PreTrainedModel, context: int) -> Operations:
    """Count the operations of a prefill; the policy is None for full context.

    The model's layers must see the whole prompt; its weights may be on `meta`.
    """
    shape, config = shape_of(model.config), model.config
    work = layers_of(model, shape)
    policy = (policy or FullContext()).placed(len(work), shape.eligible)
    propagation, reading = policy.propagation, policy.rereading
    fewest = min(max(propagation.protected_tail + propagation.protected_first, 1), context)
    # For each pass over a layer: its work, its tokens, and the keys that a token sees.
    passes = []
    for rates in propagation.prefill_passes(len(work), context):
        arriving = [max(rate * context, fewest) if rate else 0.0 for rate in rates]
        passes += [(*each, each[1] / 2) for each in zip(work, arriving, strict=True)]
    if reading is not None:
        again = reading.compute_rate(context) * context
        seen = context + again / max(len(reading.spans(context)), 1) / 2
        passes += [(layer, again, seen) for layer in work]
    linear = sum(2 * tokens * layer.weights for layer, tokens, _ in passes)
    if propagation.restarts:  # the choosing pass ends when its layer has queries, keys and values
        acting = propagation.acting_layers(len(work))
        linear += sum(2 * context * work[index].projection_weights for index in acting)
    return Operations(
        linear,
        sum(2 * tokens * seen * layer.pair_width for layer, tokens, seen in passes),
        sum(4 * tokens * layer.state_elements for layer, tokens, _ in passes),
        2.0 * config.hidden_size * config.vocab_size,
    )


def allowed_prefill(policy: CachePolicy | None, model: PreTrainedModel, context: int) -> float:
    """Return full context's operations over the policy's: the largest speed-up of a prefill."""
    full, own = (operations(each, model, context).total for each in (None, policy))
    return full / own


def layers_of(model: PreTrainedModel, shape: ModelShape) -> list[LayerWork]:
    parts, config, found = ModelParts(model), model.config, []
    for layer, attention, held in zip(parts.layers, parts.attentions, shape.layers, strict=True):
        if held.window is not None:
            raise ValueError(f"layers must see the whole prompt, got a window of {held.window}")
        output: Any = getattr(attention, "o_proj", None)
        projections = 0.0 if attention is None else _weights(attention, config)
        found.append(
            LayerWork(
                _weights(layer, config),
                projections - (0 if output is None else output.weight.numel()),
                0 if attention is None else config.num_attention_heads * _head_dims(config),
                held.state_elements,
            )
        )
    return found


def _weights(module: nn.Module, config: Any) -> float:
    """Return a module's weights without norms and biases; of experts, those that are active."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((n for n in (getattr(config, each, None) for each in names) if n), None)
    active = config.num_experts_per_tok / experts if experts else 1.0
    return float(
        sum(
            (active if ".experts." in name else 1.0) * each.numel()
            for name, each in module.named_parameters()
            if each.ndim > 1 and not name.endswith("bias")
        )
    )


def _head_dims(config: Any) -> int:
    """Return the width of a head's keys and values together, as they are multiplied."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    head_dim = getattr(config, "head_dim", None)
    return 2 * int(head_dim or config.hidden_size // config.num_attention_heads)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, action="append", required=True)
    parser.add_argument("--tsp-rate", type=float, default=0.2)
    parser.add_argument("--tsp-layer", type=int)
    given = parser.parse_args(arguments)
    policy = FastKV(retention_rate=0.1, tsp_rate=given.tsp_rate, tsp_layer=given.tsp_layer)
    with torch.device("meta"):
        config = load_config(given.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for context in given.context:
        print(f"{context}: {allowed_prefill(policy, model, context):.3f}")


if __name__ == "__main__":
    main()
