"""Any configuration of Transformers at a tiny size, by the names of its fields."""

import contextlib
from typing import Any

from tests.integrations.model.builds.patches import PATCHES

VOCAB_SIZE = 128
FIRST_SPECIAL_ID = 100  # below it, and above 0, are the tokens of prompts
WINDOW = 16
LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16

# Fields are set where a configuration has them and their default is not None.
_SIZES: list[tuple[int, str]] = [
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers layers num_blocks "
        "num_decoder_layers encoder_layers",
    ),
    (
        HIDDEN,
        "hidden_size d_model n_embd embedding_size embedding_dim emb_dim input_embedding_size "
        "word_embed_proj_dim lru_width output_dim out_hidden_size text_hidden_size encoder_hidden_size "
        "projector_hidden_size projection_hidden_dim projection_dim attention_hidden_size mamba_d_ssm "
        "image_text_hidden_size moe_hidden_size embed_dim hidden_size_global backbone_hidden_size "
        "vision_hidden_size projector_input_dim projector_output_dim output_embedding_size "
        "projection_hidden_size patch_embed_hidden_size output_channels decoder_hidden_size "
        "output_proj_dims linear_num_dim",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "swa_num_attention_heads num_sliding_attention_heads encoder_attention_heads index_n_heads "
        "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads "
        "num_decoder_attention_heads resampler_heads resampler_n_heads num_routed_experts "
        "num_experts num_local_experts n_routed_experts moe_num_experts conf_num_attention_heads",
    ),
    (
        KV_HEADS,
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads "
        "linear_num_key_heads num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts n_group "
        "n_groups mamba_n_groups mamba_ngroups n_mamba_heads num_global_key_value_heads "
        "num_experts_per_token o_groups",
    ),
    (
        HEAD_DIM,
        "head_dim attention_head_dim swa_head_dim dim_head attention_head_size index_head_dim "
        "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim v_head_dim kv_channels "
        "resampler_head_dim resampler_dim_head d_head global_head_dim d_kv "
        "linear_k_head_dim linear_v_head_dim",
    ),
    (
        80,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff d_inner dim_ff dff mlp_dim "
        "ffn_hidden_size intermediate_size_mlp dense_intermediate_size ff_intermediate_size "
        "shared_intermediate_size block_ff_dim feed_forward_size projection_intermediate_size "
        "alignment_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size share_expert_dim router_hidden_size "
        "vision_output_dim image_size base_channels num_embeddings codebook_size crop_size resolution kv_lora_rank q_lora_rank mamba_d_head",
    ),
    (24, "o_lora_rank moe_latent_size"),
    (
        8,
        "qk_rope_head_dim qk_nope_head_dim time_step_rank mamba_dt_rank state_size mamba_d_state "
        "ssm_state_size hidden_size_per_layer_input laurel_rank rotary_dim d_rel gated_norm_rank "
        "adapter_rank hc_lowrank ple_embed_dim patch_size block_multiple_of index_topk "
        "num_codebooks",
    ),
    (
        WINDOW,
        "sliding_window window_size attention_window_size attention_chunk_size "
        "sliding_window_size mamba_chunk_size chunk_size local_attention rel_extent "
        "keep_window_size",
    ),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (
        2,
        "depth num_encoder_layers resampler_depth conf_num_hidden_layers "
        "num_lstm_layers topk_group max_num_tiles",
    ),
    (
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
        "num_dense_layers",
    ),
]
_BY_NAME = {name: size for size, names in _SIZES for name in names.split()}

_DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

# Of the layers of what is not the decoder: images, sound, codebooks.
_SIDE: dict[str, Any] = dict.fromkeys(
    ["num_hidden_layers", "n_layer", "num_layers", "layers", "depth", "num_blocks"], 2
) | {"num_key_value_heads": HEADS, "in_channels": 3, "num_position_embeddings": 16}

_ZERO = [
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
]


def shrunk(config_class: Any, *, side: bool = False, **patch: Any) -> dict[str, Any]:
    """Arguments for a tiny configuration of a class.

    Args:
        config_class: of Transformers.
        side: whether it is of something beside the decoder, such as an image encoder.
        patch: fields in the place of what the names say; a dictionary for a part's configuration
            is merged into what is made for the part.

    Returns:
        By name; the parts' configurations are objects.
    """
    patch = {**PATCHES.get(config_class.model_type, {}), **patch}
    default = config_class()
    fields: dict[str, Any] = {}
    special = FIRST_SPECIAL_ID
    for name in config_class.__dataclass_fields__:
        value = _read(default, name)
        if name in patch and not isinstance(patch[name], dict):
            continue
        if hasattr(value, "sub_configs"):
            part = patch.get(name, {})
            beside = side or not _is_decoder(name)
            fields[name] = type(value)(**shrunk(type(value), side=beside, **part))
        elif name.endswith(("_token_id", "_token_index", "_token_ids", "_id_index")):
            if name in ("bos_token_id", "eos_token_id"):
                fields[name] = None
            elif name.startswith(("decoder_start", "forced_", "sep")):
                fields[name] = 1
            elif name == "pad_token_id":
                fields[name] = 0
            elif isinstance(value, int):
                fields[name], special = special, special + 1
        elif name in _ZERO and value is not None:
            fields[name] = 0.0
        elif side and name in _SIDE and value is not None:
            fields[name] = _SIDE[name]
        elif name in _BY_NAME and isinstance(value, int):
            fields[name] = _BY_NAME[name]
        elif name in ("num_key_value_heads", "head_dim") and value is None:
            fields[name] = None if side else _BY_NAME[name]
        elif isinstance(value, (list, tuple)):
            layers = _read(default, "num_hidden_layers")
            if layers and len(value) == layers and not side:
                fields[name] = short(list(value), LAYERS)
        elif name == "rope_parameters" and not side:
            axes = getattr(config_class, "ignore_keys_at_rope_validation", None) or ()
            if "mrope_section" in axes:
                value = {"mrope_section": [1, 1, 1], **(value or _DEFAULT_ROPE)}
            if isinstance(value, dict):
                fields[name] = _rope(value)
        elif name == "is_decoder":
            fields[name] = True
    known = config_class.__dataclass_fields__
    if "tie_word_embeddings" in known:
        fields["tie_word_embeddings"] = False
    if "use_cache" in known:
        fields["use_cache"] = True
    if fields.get("kv_lora_rank") is not None and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS  # latent attention makes keys for every head
    for name, value in patch.items():
        if not isinstance(value, dict) or name not in fields or isinstance(fields[name], dict):
            fields[name] = value
    return fields


def short(kinds: list[Any], count: int) -> list[Any]:
    """As many layers' kinds in turn, so that each is among the first."""
    distinct = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    return [distinct[i % len(distinct)] for i in range(count)]


def _read(config: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # some fields differ from layer to layer
        return getattr(config, name)
    return getattr(type(config), name, None)


def _is_decoder(part: str) -> bool:
    return part in ("text_config", "llm_config", "decoder", "generator", "thinker_config") or (
        part in ("ffn_config", "attn_config")
    )


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Sections of a rotary embedding over several axes, for heads of `HEAD_DIM`."""
    if all(isinstance(each, dict) for each in value.values()):
        return {kind: _rope(each) for kind, each in value.items()}
    value = dict(value)
    section = value.get("mrope_section")
    if section:
        half = int(HEAD_DIM * value.get("partial_rotary_factor", 1.0)) // 2
        rest = max(half // 4, 0)
        value["mrope_section"] = (
            [half - 2 * rest, rest, rest] if len(section) == 3 else [half // len(section)] * 4
        )
    return value
