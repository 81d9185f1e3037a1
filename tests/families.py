"""Tiny randomly initialised models of the decoder families of Transformers.

Every model runs on the CPU in milliseconds and attends peakedly: the projections to queries and
keys are scaled up, so that a key too many or too few shows in the logits. What sets a family apart
from the others, such as an alternating sliding window, is on and small enough to matter for a
prompt of some 40 tokens.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from tests.integrations.model.builds.weights import SCALE, fill

VOCAB_SIZE = 97
PAD_TOKEN_ID = 0
WINDOW = 16

# Read by those configurations that have a field or an alias of the name.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN_ID,
    "use_cache": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GATED_DELTA: dict[str, Any] = {
    # Linear attention may yield nearly nothing, which a norm without this would blow up.
    "rms_norm_eps": 1e-2,
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALTERNATING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL] * 2}
_TWO_IN_THREE: dict[str, Any] = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
}


@dataclass(frozen=True)
class Family:
    """How to build one family's tiny model.

    Attributes:
        model_type: Transformers' name of the architecture.
        options: of the configuration, beside and before the common ones.
        scale: gain of the projections to queries and to keys.
        window: tokens a sliding or chunked layer sees, or None where all layers see all.
        attn_implementation: the one to test with, where it cannot be sdpa.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = SCALE
    window: int | None = None
    attn_implementation: str = "sdpa"

    def build(self, seed: int = 0, *, attn_implementation: str | None = None) -> PreTrainedModel:
        """Builds the model, float32, in evaluation mode, without an end-of-sequence token."""
        config_class: Any = CONFIG_MAPPING[self.model_type]
        known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
        common = {name: value for name, value in _COMMON.items() if name in known}
        config = config_class(**{**common, **self.options})
        # Building a model draws from the global generator. Some import torch.jit, now deprecated.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attn_implementation or self.attn_implementation
            )
        fill(model, torch.Generator().manual_seed(seed), self.scale)
        return cast(PreTrainedModel, model.eval())


_TABLE: dict[str, Family] = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {"head_dim": 10, "sliding_window": None}),
    "mistral_sliding": Family("mistral", {"head_dim": 10, "sliding_window": WINDOW}, window=WINDOW),
    "ministral3": Family("ministral3", {"head_dim": 10, "max_position_embeddings": 262144}),
    "mixtral": Family("mixtral"),
    "qwen2": Family("qwen2"),
    "qwen2_moe": Family("qwen2_moe"),
    "qwen3": Family("qwen3", {"head_dim": 12}),
    "qwen3_moe": Family("qwen3_moe", {"head_dim": 12}),
    "qwen3_next": Family("qwen3_next", _GATED_DELTA),
    "qwen3_5": Family("qwen3_5_text", _GATED_DELTA),
    "gemma": Family("gemma", {"head_dim": 12}),
    "gemma2": Family(
        "gemma2",
        # A head size that the scale of the scores is not made from, and caps that bend the scores.
        {**_ALTERNATING, "head_dim": 12, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 4.0},
        window=WINDOW,
        attn_implementation="eager",
    ),
    "gemma3": Family(
        "gemma3_text", {**_TWO_IN_THREE, "head_dim": 12, "query_pre_attn_scalar": 9}, window=WINDOW
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **_TWO_IN_THREE,
            "head_dim": 12,
            "num_kv_shared_layers": 2,
            "layer_types": [_SLIDING, _FULL] * 3,
            "intermediate_size": [80] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
        scale=0.95,  # the scores are not divided by anything
        window=WINDOW,
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_TWO_IN_THREE,
            "head_dim": 12,
            "global_head_dim": 16,
            "layer_types": [_SLIDING, _FULL] * 3,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        },
        scale=0.95,  # the scores are not divided by anything
        window=WINDOW,
    ),
    "phi": Family("phi"),
    "phi3": Family("phi3", {"sliding_window": None}),
    "phimoe": Family("phimoe"),
    "granite": Family("granite", {"attention_multiplier": 0.45, "residual_multiplier": 0.8}),
    "granitemoe": Family("granitemoe", {"attention_multiplier": 0.45}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            "attention_multiplier": 0.45,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "shared_intermediate_size": 24,
        },
    ),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", _ALTERNATING, window=WINDOW),
    "olmoe": Family("olmoe"),
    "cohere": Family("cohere", {"logit_scale": 1.0}),
    "cohere2": Family(
        "cohere2",
        {
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
            "logit_scale": 1.0,
        },
        window=WINDOW,
    ),
    "glm": Family("glm", {"head_dim": 12}),
    "glm4": Family("glm4", {"head_dim": 12}),
    "starcoder2": Family("starcoder2", {"sliding_window": None}),
    "gpt_neox": Family("gpt_neox"),
    "gpt_neo": Family(
        "gpt_neo",
        {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        scale=1.0,  # the scores are not divided by anything
        window=WINDOW,
        attn_implementation="eager",
    ),
    "gptj": Family("gptj", {"rotary_dim": 4}, attn_implementation="eager"),
    "codegen": Family(
        "codegen", {"num_attention_heads": 4, "rotary_dim": 4}, attn_implementation="eager"
    ),
    "falcon": Family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": Family(
        "falcon", {"new_decoder_architecture": False, "multi_query": True}
    ),
    "falcon_alibi": Family(
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "alibi": True,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {**_ALTERNATING, "head_dim": 12, "max_position_embeddings": 131072},
        window=WINDOW,
        attn_implementation="eager",
    ),
    "deepseek_v2": Family("deepseek_v2", _LATENT),
    "deepseek_v3": Family("deepseek_v3", _LATENT),
    "smollm3": Family("smollm3"),
    "stablelm": Family("stablelm"),
    "nemotron": Family("nemotron", scale=0.9),
    "exaone4": Family(
        "exaone4",
        {"sliding_window": WINDOW, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
        window=WINDOW,
    ),
    "ernie4_5": Family("ernie4_5", {"head_dim": 12}),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", {"head_dim": 12}),
    "seed_oss": Family("seed_oss", {"head_dim": 12}),
    "minimax_m2": Family("minimax_m2", {"head_dim": 12}),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    "jamba": Family(
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "mamba": Family("mamba", {"state_size": 8, "time_step_rank": 8}, attn_implementation="eager"),
    "gpt2": Family("gpt2"),
    "gpt_bigcode": Family("gpt_bigcode", {"multi_query": True}),
    "opt": Family("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "bloom": Family("bloom", attn_implementation="eager"),
    "mpt": Family("mpt", {"max_seq_len": 512, "expansion_ratio": 2}, attn_implementation="eager"),
}

# Those that the installed Transformers has.
FAMILIES = {
    name: family for name, family in _TABLE.items() if family.model_type in CONFIG_MAPPING_NAMES
}
