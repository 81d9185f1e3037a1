"""What a field of a configuration is to be in a tiny model, by its name."""

from typing import Any

VOCAB_SIZE = 128
FIRST_SPECIAL_ID = 100  # below it, and above 0, are the tokens of prompts
WINDOW = 16
LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16

_NAMES: list[tuple[int, str]] = [
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
    (
        LAYERS,
        """decoder_layers encoder_layers layers n_layer n_layers num_blocks num_decoder_layers
        num_hidden_layers num_layers""",
    ),
    (
        HIDDEN,
        """attention_hidden_size d_model decoder_hidden_size emb_dim embed_dim embedding_dim
        embedding_size encoder_hidden_size hidden_size hidden_size_global image_text_hidden_size
        input_embedding_size lru_width mamba_d_ssm moe_hidden_size n_embd out_hidden_size
        output_channels output_dim output_embedding_size output_proj_dims patch_embed_hidden_size
        projection_dim projection_hidden_dim projection_hidden_size projector_hidden_size
        projector_input_dim projector_output_dim text_hidden_size vision_hidden_size
        word_embed_proj_dim""",
    ),
    (
        HEADS,
        """attention_heads conf_num_attention_heads decoder_attention_heads encoder_attention_heads
        linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads
        moe_num_experts n_head n_heads n_routed_experts num_attention_heads
        num_decoder_attention_heads num_experts num_heads num_local_experts
        num_sliding_attention_heads resampler_heads resampler_n_heads swa_num_attention_heads""",
    ),
    (
        KV_HEADS,
        """kv_n_heads linear_num_key_heads mamba_n_groups mamba_ngroups moe_k moe_top_k moe_topk
        n_group n_groups n_mamba_heads num_experts_per_tok num_key_value_heads num_kv_heads o_groups
        swa_num_key_value_heads top_k_experts""",
    ),
    (
        HEAD_DIM,
        """attention_head_dim attention_head_size d_head d_kv dim_head global_head_dim head_dim
        index_head_dim kv_channels linear_head_dim linear_key_head_dim linear_value_head_dim
        mamba_head_dim resampler_dim_head resampler_head_dim swa_head_dim v_head_dim""",
    ),
    (
        80,
        """alignment_intermediate_size d_ff d_inner decoder_ffn_dim dense_intermediate_size dff
        dim_ff encoder_ffn_dim feed_forward_size ffn_dim ffn_hidden_size intermediate_size
        intermediate_size_mlp mlp_dim projection_intermediate_size shared_intermediate_size""",
    ),
    (
        32,  # as many index heads, since scores of a few are often 0: equals, any of which is best
        """base_channels codebook_size crop_size expert_ffn_hidden_size image_size index_n_heads
        kv_lora_rank mamba_d_head moe_intermediate_size moe_shared_expert_intermediate_size
        num_embeddings q_lora_rank resolution router_hidden_size share_expert_dim
        shared_expert_intermediate_size vision_output_dim""",
    ),
    (24, "o_lora_rank"),
    (
        8,
        """adapter_rank d_rel gated_norm_rank hc_lowrank hidden_size_per_layer_input index_topk
        laurel_rank mamba_d_state mamba_dt_rank num_codebooks patch_size ple_embed_dim
        qk_nope_head_dim qk_rope_head_dim rotary_dim ssm_state_size state_size time_step_rank
        block_multiple_of""",
    ),
    (
        WINDOW,
        """attention_chunk_size attention_window_size chunk_size keep_window_size local_attention
        mamba_chunk_size rel_extent sliding_window sliding_window_size window_size""",
    ),
    (512, "max_position_embeddings max_seq_len n_ctx n_positions"),
    (2, "conf_num_hidden_layers depth max_num_tiles num_lstm_layers resampler_depth topk_group"),
    (
        1,
        """first_k_dense_replace moe_num_shared_experts n_shared_experts num_dense_layers
        num_shared_experts""",
    ),
]
SIZES = {name: size for size, names in _NAMES for name in names.split()}

# In what is not the decoder: images, sound, codebooks. No decoder has as few layers.
SIDE_SIZES: dict[str, Any] = {
    "depth": 2,
    "in_channels": 3,
    "layers": 2,
    "n_layer": 2,
    "num_blocks": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "num_layers": 2,
    "num_position_embeddings": 16,
}

DROPOUTS = frozenset(
    {"attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"}
)
