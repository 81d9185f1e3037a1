"""Models that the library's tests hold against dense attention, and that need no self-check."""

_NAMES = """
afmoe apertus arcee aria aria_text axk1 aya_vision beam biogpt bitnet chameleon cohere cohere2
cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni ctrl cwm
dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid dots1 emu3 ernie4_5
ernie4_5_moe ernie4_5_vl_moe exaone4 exaone4_5 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3
gemma3_text gemma4 gemma4_unified gemma4_unified_text glm glm4 glm46v glm4_moe glm4_moe_lite glm4v
glm4v_moe glm_ocr glmga got_ocr2 gpt_neox gpt_oss granite granite4_vision granite_docling
granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
hunyuan_vl hy_v3 hyperclovax hyperclovax_vision_v2 idefics2 idefics3 internlm3 internvl iquestcoder
jais2 janus jetmoe kimi_k25 kolibri1 laguna lighton_ocr llama llava llava_next llava_next_video
llava_onevision mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral
ministral3 mistral mistral3 mistral4 mixtral modernbert-decoder molmo2 moss_transcribe_diarize
muse_glimmer muse_spark nanochat nemotron olmo olmo2 olmo3 olmoe opt ovis2 paddleocr_vl paligemma
persimmon phi phi3 phi4_multimodal phimoe pp_chart2table qianfan_ocr qwen2 qwen2_5_omni_thinker
qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe seed_oss
shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7 vaultgemma video_llama_3
video_llava vipllava whisper youtu
"""

# By the model_type of the whole model's configuration. `make families` holds every one of them;
# paligemma, which reads a prompt without an image both ways, is held by the tests with images.
TESTED = frozenset(_NAMES.split())
