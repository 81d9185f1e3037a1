"""Write a trained network as a plain Transformers Llama with a word-level tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import network as shape
from .network import Network
from .vocabulary import BOS, END, PAD, SPECIAL_TOKENS, UNKNOWN, VOCAB_SIZE, token_names


def llama_config() -> LlamaConfig:
    """Return the configuration of the needle model."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.HIDDEN,
        intermediate_size=shape.INTERMEDIATE,
        num_hidden_layers=shape.NUM_LAYERS,
        num_attention_heads=shape.QUERY_HEADS,
        num_key_value_heads=shape.KV_HEADS,
        head_dim=shape.HEAD_DIM,
        max_position_embeddings=shape.MAX_POSITION,
        rms_norm_eps=shape.NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": shape.ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def llama_state(network: Network) -> dict[str, Tensor]:
    """Return the weights under the names of ``LlamaForCausalLM``, fused projections split."""
    state = {
        "model.embed_tokens.weight": network.embedding.weight,
        "model.norm.weight": network.norm.weight,
    }
    sizes = [
        heads * shape.HEAD_DIM for heads in (shape.QUERY_HEADS, shape.KV_HEADS, shape.KV_HEADS)
    ]
    for index, block in enumerate(network.layers()):
        q, k, v = torch.split(block.qkv.weight, sizes)
        gate, up = block.gate_up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.down.weight,
            "input_layernorm": block.attention_norm.weight,
            "post_attention_layernorm": block.mlp_norm.weight,
        }
        state |= {f"model.layers.{index}.{name}.weight": weight for name, weight in parts.items()}
    return {name: weight.detach().clone() for name, weight in state.items()}


def to_llama(network: Network) -> LlamaForCausalLM:
    """Return the network as a ``LlamaForCausalLM`` in float32 that computes the same logits."""
    model = LlamaForCausalLM(llama_config())
    missing, unexpected = model.load_state_dict(llama_state(network), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=False
    )
    return model.eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token to a word, words apart by blanks, nothing added."""
    vocabulary = {name: index for index, name in enumerate(token_names())}
    words = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNKNOWN]))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[END],
        pad_token=SPECIAL_TOKENS[PAD],
        unk_token=SPECIAL_TOKENS[UNKNOWN],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_pretrained(network: Network, folder: Path) -> None:
    """Write model and tokenizer to ``folder``; weights in bfloat16, half the size of float32."""
    to_llama(network).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
