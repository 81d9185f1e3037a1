"""Every type of decoder the installed Transformers has, and how to build a tiny model of it."""

import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.integrations.model.builds.shrink import shrunk
from tests.integrations.model.builds.sizes import WINDOW
from tests.integrations.model.builds.weights import SCALE, fill

# Types of which more than one kind of decoder is of interest: name -> (type, fields).
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOWS: dict[str, Any] = {"layer_types": [_SLIDING, _FULL] * 2, "sliding_window": WINDOW}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_sliding": ("mistral", {"sliding_window": WINDOW}),
    "mixtral_sliding": ("mixtral", {"sliding_window": WINDOW}),
    "starcoder2_sliding": ("starcoder2", {"sliding_window": WINDOW}),
    "phi3_sliding": ("phi3", {"sliding_window": WINDOW}),
    "qwen2_windows": ("qwen2", {**_WINDOWS, "use_sliding_window": True}),
    "qwen3_windows": ("qwen3", {**_WINDOWS, "use_sliding_window": True}),
    "doge_sparse": ("doge", {"keep_window_size": WINDOW}),
    "falcon_grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1},
    ),
    "falcon_alibi": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "alibi": True,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "gpt_bigcode_multi_head": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neo_global": ("gpt_neo", {"attention_types": [[["global"], 4]]}),
    "gemma2_uncapped": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma3_text_full": ("gemma3_text", {"layer_types": [_FULL] * 4}),
    "gemma4_text_shared": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "moshi_wide": ("moshi", {"sliding_window": 512}),
    "opt_narrow_embedding": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "stablelm_partial": ("stablelm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True}),
    "llama4_text_mixed": (
        "llama4_text",
        {"no_rope_layers": [1, 0] * 2, "layer_types": ["chunked_attention", _FULL] * 2},
    ),
    "minimax_m3_vl_text_sparse": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["minimax_m3_sparse", _FULL] * 2,
            "index_n_heads": 2,
            "index_block_size": 4,
            "index_topk_blocks": 3,
        },
    ),
    "llama_multi_query": ("llama", {"num_key_value_heads": 1}),
    "llama_multi_head": ("llama", {"num_key_value_heads": 4}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False}),
}

# Gain of the projections to queries and keys where scores are not divided by anything.
SCALES = dict.fromkeys(
    (
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
        "gpt_neo",
        "gpt_neo_global",
        "gemma4_text_shared",
    ),
    0.95,
)

# What the two lists of Transformers name but is no decoder of text that reads a prompt.
_ENCODER_DECODER = "an encoder-decoder"
_TIMM = "needs timm for its images"
NOT_BUILT = {
    "blt": "reads bytes in patches",
    "diffusion_gemma": "writes by diffusion",
    "evolla": "is in the list of images and text, but reads proteins",
    "fast_vlm": _TIMM,
    "florence2": _ENCODER_DECODER,
    "gemma3n": _TIMM,
    "gemma4_assistant": "a draft model, which reads another model's states",
    "gemma4_unified_assistant": "a draft model, which reads another model's states",
    "inkling_mm_model": "needs scipy for its images",
    "musicgen": _ENCODER_DECODER,
    "musicgen_melody": _ENCODER_DECODER,
    "perception_lm": _TIMM,
    "pi0": "writes movements, not tokens",
    "pix2struct": _ENCODER_DECODER,
    "pp_formulanet": _ENCODER_DECODER,
    "t5gemma2": _ENCODER_DECODER,
    "udop": _ENCODER_DECODER,
    "vision-encoder-decoder": _ENCODER_DECODER,
}


@dataclass(frozen=True)
class Build:
    """How to build one tiny model."""

    name: str
    model_type: str
    patch: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        config_class: Any = CONFIG_MAPPING[self.model_type]
        return config_class(**shrunk(config_class, **self.patch))

    def model(self, seed: int = 1, *, attn_implementation: str | None = None) -> PreTrainedModel:
        """Builds the model, float32, in evaluation mode, with weights that attend peakedly."""
        # Building a model draws from the global generator, and warns of much that is not ours.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            config = self.config()
            auto = (
                AutoModelForImageTextToText
                if self.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
                else AutoModelForCausalLM
            )
            model = auto.from_config(
                config, attn_implementation=attn_implementation, dtype=torch.float32
            )
        fill(model, torch.Generator().manual_seed(seed), SCALES.get(self.name, SCALE))
        return cast(PreTrainedModel, model.eval())


def builds() -> dict[str, Build]:
    """All builds by name: every type, then the variants."""
    types = dict.fromkeys(
        [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    )
    found = {name: Build(name, name) for name in types if name not in NOT_BUILT}
    for name, (kind, patch) in VARIANTS.items():
        if kind in types:
            found[name] = Build(name, kind, patch)
    return found


@cache
def built(name: str) -> PreTrainedModel:
    """The model of a build, for tests that do not change it."""
    return builds()[name].model()
