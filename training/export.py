"""Convert a trained network to a Transformers Llama with a word-level tokenizer, and save both."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvpolicy.evaluation.tasks.needle.vocabulary import (
    BOS,
    END,
    PAD,
    SPECIAL_TOKENS,
    UNKNOWN,
    token_names,
)

from .network import NORM_EPS, Network, NetworkShape


def llama_config(shape: NetworkShape) -> LlamaConfig:
    """Return the Transformers configuration of a network of this shape."""
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def llama_state(network: Network) -> dict[str, Tensor]:
    """Return a copy of the weights under the names of ``LlamaForCausalLM``, projections split."""
    state = {
        "model.embed_tokens.weight": network.embedding.weight,
        "model.norm.weight": network.norm.weight,
    }
    shape = network.shape
    sizes = [
        heads * shape.head_dim for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
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
    model = LlamaForCausalLM(llama_config(network.shape))
    missing, unexpected = model.load_state_dict(llama_state(network), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=False
    )
    return model.eval()


def build_tokenizer(names: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits text at blanks, with one token per word.

    Args:
        names: every token's text, in the order of the ids; the special ones have the needle
            language's names.
    """
    vocabulary = {name: index for index, name in enumerate(names)}
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


def save_pretrained(network: Network, folder: Path, names: Sequence[str] | None = None) -> None:
    """Write the model, in bfloat16 (half the size of float32), and the tokenizer to ``folder``.

    Args:
        network: the trained network.
        folder: made where it does not exist.
        names: the tokens' texts, the needle language's by default (see `build_tokenizer`).
    """
    to_llama(network).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(names or token_names()).save_pretrained(folder)
