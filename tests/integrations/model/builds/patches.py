"""Fields that their names alone do not say, by the configuration's model type."""

from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

# Those of a part, such as a text_config, hold wherever the part is.
PATCHES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": "auto"},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL] * 2,
        "rope_parameters": {_SLIDING: _AXES, _FULL: _AXES},
    },
    "cwm": {"bos_token_id": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "doge": {"keep_window_size": 512},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"],
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "emu3": {"vocabulary_map": {"<|extra_200|>": 100}},
    "emu3_text_model": {"bos_token_id": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_AXES, "mrope_section": [3, 3, 2]}},
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [80] * 4,
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "deepstack_layer_map": [(-1, 1)],
        "spatial_target_layers": [2],
        "downsample_rate": "1/2",
    },
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "granite": {"attention_multiplier": 0.25},
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoe_swa": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "granitemoehybrid": {
        "attention_multiplier": 0.25,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_d_head": "auto",
    },
    "hrm_text": {"num_layers_per_stack": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", _FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", _FULL] * 2},
    "llama4_text": {"floor_scale": 8, "attn_scale": 0.3},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "mistral": {"sliding_window": None},
    "mllama_text_model": {"bos_token_id": 1, "cross_attention_layers": [1]},
    "mllama_vision_model": {
        "max_num_tiles": 4,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 192,  # of the last layer and the two
    },
    "modernbert-decoder": {"bos_token_id": 1},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 16, 16)},
    # Below it, prefill takes time steps for longer than they are, which decoding does not.
    "nemotron_h": {"time_step_min": 1e-9},
    "radio": {"video_temporal_patch_size": 2},
    # Linear attention may yield nearly nothing, which a norm without this would blow up.
    "qwen3_next": {"rms_norm_eps": 1e-2},
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 8)},
    "paddleocr_vl_text": {"rope_parameters": _AXES},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "roc_bert": {"shape_vocab_size": 20, "shape_embed_dim": 8, "pronunciation_vocab_size": 20},
    "step3p5": {"sliding_window": 16, "layer_types": [_SLIDING, _FULL] * 2},
    "unlimited_ocr_text": {"num_key_value_heads": 4},  # its eager attention repeats no keys
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    # As of nemotron_h.
    "zamba2": {"time_step_min": 1e-9},
    "zaya": {"num_experts_per_tok": 1},
}
