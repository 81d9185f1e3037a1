"""Tiny randomly initialised vision-language models, one for each way of reaching the decoder.

As in `tests.families`, attention is peaked, so that a key too many or too few shows in the logits.
What sets a family apart is on: two grids for position ids of three axes, features that are added
after the first layers, windows smaller than an image, images that attend both ways.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.integrations.model.builds.weights import SCALE, fill

VOCAB_SIZE = 97
PAD, IMAGE, VIDEO, BEGIN, END, GLOBAL = 0, 90, 91, 92, 93, 94
# What a text may consist of; the others say where images stand.
FIRST_SPECIAL = 90
WINDOW = 20

_TEXT: dict[str, Any] = {
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
    "pad_token_id": PAD,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_QWEN_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


@dataclass(frozen=True)
class VisionFamily:
    """How to build one family's tiny model, and how its processor lays out an image."""

    model_type: str  # Transformers' name of the architecture
    # Options of the decoder's configuration, beside and before the common ones.
    text: dict[str, Any]
    tower: dict[str, Any]  # options of the image encoder's configuration
    options: dict[str, Any] = field(default_factory=dict)  # of the outer configuration
    # Patches along one side of an image, before they are merged; None where images have grids of
    # their own.
    side: int | None = 10
    patch: int = 4  # pixels along one side of a patch
    merge: int = 2  # patches along one side that become one token
    # Tokens before and after those of an image.
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    leads: bool = False  # whether images stand before all text
    # Whose tokens see each other both ways.
    both_ways: Literal["nothing", "image", "prompt"] = "nothing"
    # Name of the input that says which tokens are images' (or, with a prompt that attends both
    # ways, an answer's), if there is one.
    types: Literal["token_type_ids", "mm_token_type_ids"] | None = None
    axes: Literal[1, 3] = 1  # of the position ids that the rotary embedding reads
    first: int = 0  # position of the first token
    windows: tuple[int | None, ...] = (None,) * 4  # by layer, tokens that a sliding layer sees
    drops_after: int = 1  # the layer after which tests drop tokens
    second_image: bool = True  # whether `generate` takes an image in a later turn
    scale: float = SCALE  # gain of the projections to queries and to keys

    def build(self, seed: int = 0, *, attn_implementation: str = "sdpa") -> PreTrainedModel:
        """Builds the model, float32, in evaluation mode, without an end-of-sequence token.

        No special token is ever the most probable, so that what was generated is text.
        """
        config_class: Any = CONFIG_MAPPING[self.model_type]
        config = config_class(
            text_config={**_TEXT, **self.text},
            vision_config=dict(self.tower),
            tie_word_embeddings=False,
            **self.options,
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(
                config, attn_implementation=attn_implementation
            )
        fill(model, torch.Generator().manual_seed(seed), self.scale)
        cast(Any, model).lm_head.weight.data[FIRST_SPECIAL:] = 0
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        return cast(PreTrainedModel, model.eval())


FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        "llava",
        {"model_type": "llama"},
        {**_TOWER, "model_type": "clip_vision_model", "image_size": 20, "patch_size": 4},
        {"image_token_index": IMAGE, "image_seq_length": 25, "vision_feature_layer": -2},
        side=5,
        merge=1,
    ),
    "qwen2_5_vl": VisionFamily(
        "qwen2_5_vl",
        {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        {
            **_QWEN_TOWER,
            "depth": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        _QWEN_TOKENS,
        side=None,
        around=((BEGIN,), (END,)),
        types="mm_token_type_ids",
        axes=3,
        second_image=False,
    ),
    "qwen3_vl": VisionFamily(
        "qwen3_vl",
        {
            "model_type": "qwen3_vl_text",
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 2, 2],
                "mrope_interleaved": True,
            },
        },
        {
            **_QWEN_TOWER,
            "depth": 3,
            "num_position_embeddings": 64,
            # Added after layers 0, 1 and 2: before, at and after the layer that tests drop after.
            "deepstack_visual_indexes": [0, 1, 2],
        },
        _QWEN_TOKENS,
        side=None,
        around=((BEGIN,), (END,)),
        types="mm_token_type_ids",
        axes=3,
        second_image=False,
    ),
    "gemma3": VisionFamily(
        "gemma3",
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "head_dim": 12,
            "query_pre_attn_scalar": 9,
        },
        {
            **_TOWER,
            "model_type": "siglip_vision_model",
            "image_size": 40,
            "patch_size": 4,
            "vision_use_head": False,
        },
        {
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "mm_tokens_per_image": 25,
        },
        around=((BEGIN,), (END,)),
        both_ways="image",
        types="token_type_ids",
        windows=(WINDOW, WINDOW, None) * 2,
        drops_after=2,
    ),
    "internvl": VisionFamily(
        "internvl",
        {"model_type": "qwen2", "num_hidden_layers": 5},
        {**_TOWER, "image_size": [40, 40], "patch_size": [4, 4]},
        {"image_token_id": IMAGE, "image_seq_length": 25},
        around=((BEGIN,), (END,)),
        windows=(None,) * 5,
    ),
    **{
        name: VisionFamily(
            name,
            {"model_type": "llama"},
            {**_TOWER, "image_size": 40, "patch_size": 4},
            {"image_token_id": IMAGE, "scale_factor": 2},
            around=((BEGIN, GLOBAL), (BEGIN,)),
        )
        for name in ("smolvlm", "idefics3")
    },
    "paligemma": VisionFamily(
        "paligemma",
        {"model_type": "gemma", "head_dim": 12},
        {
            **_TOWER,
            "model_type": "siglip_vision_model",
            "image_size": 20,
            "patch_size": 4,
            "vision_use_head": False,
        },
        {
            "image_token_index": IMAGE,
            "vocab_size": VOCAB_SIZE,
            "projection_dim": 48,
            "hidden_size": 48,
        },
        side=5,
        merge=1,
        leads=True,
        both_ways="prompt",
        types="token_type_ids",
        first=1,
        second_image=False,
    ),
}
