"""List the models that the library's tests compare with dense attention.

These models need no self-check.
"""

_NAMES = """
afmoe apertus arcee aria aria_text axk1 axk2 aya_vision bailing_hybrid bamba beam bert
bert-generation biogpt bitnet chameleon cohere cohere2 cohere2_moe cohere2_vision cohere_compass
cohere_compass_text cosmos3_edge cosmos3_omni ctrl cwm dbrx deepseek_ocr2 deepseek_v2 deepseek_v3
deepseek_v32 deepseek_vl deepseek_vl_hybrid dots1 dots3_note dots3_note_text electra emu3 ernie
ernie4_5 ernie4_5_moe ernie4_5_vl_moe exaone4 exaone4_5 exaone_moe falcon_h1 flex_olmo flint fuyu
gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text
glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmga got_ocr2
gpt_neox gpt_oss granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4
hyperclovax hyperclovax_vision_v2 idefics2 idefics3 inkling_text internlm3 internvl iquestcoder
jais2 janus jetmoe kimi_k25 kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
lighton_ocr llama llama4_text llava llava_next llava_next_video llava_onevision mellum
mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl
ministral ministral3 mistral mistral3 mistral4 mistral_large4 mixtral mllama
modernbert-decoder molmo2 moss_transcribe_diarize muse_glimmer muse_spark nanochat nemotron
nemotron_h nemotron_h_omni olmo olmo2 olmo3 olmo_hybrid olmoe opt ovis2 paddleocr_vl paligemma
persimmon phi phi3 phi4_multimodal phimoe pp_chart2table qianfan_ocr qwen2 qwen2_5_omni_thinker
qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text roc_bert seed_oss
shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7 vaultgemma
video_llama_3 video_llava vipllava whisper youtu zamba2 zaya
"""

# The model_type in the configuration of the whole model. `make families` tests every one of them;
# paligemma, which reads a prompt without an image in both directions, is tested with images.
TESTED = frozenset(_NAMES.split())
