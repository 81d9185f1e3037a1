"""Families that the library's tests hold against dense attention, and that need no self-check."""

_NAMES = """
bamba cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt_neox gpt_oss granite
granitemoe granitemoehybrid hunyuan_v1_dense lfm2 lfm2_moe lfm3 llama minimax_m2 ministral3 mistral
mixtral nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt phi phi3 phimoe qwen2 qwen2_moe
qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2
"""

# By the model_type of the decoder's configuration; `make families` holds every one.
TESTED = frozenset(_NAMES.split())
