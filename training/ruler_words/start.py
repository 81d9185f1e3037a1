"""Build the initial network: the needle model's layers, with new word embeddings.

The needle model has learned to find the token that followed an earlier occurrence of a word; this
step takes most of a training from scratch. Its layers recognise words by directions in the space of
its embeddings. Embeddings of new words are therefore drawn with the mean and covariance of the
needle language's symbols or fillers, and a mark takes the embedding of the needle language's token
that has the same role.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.tasks.needle import load_model
from kvpolicy.evaluation.tasks.needle.vocabulary import (
    END,
    FILLERS,
    KEY,
    LINK,
    QUERY,
    QUERY2,
    SYMBOLS,
)
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import NOUN_LIST, TOKEN_IDS, token_names
from training.network import NEEDLE_SHAPE, Network

from .batches import MAX_POSITION

SHAPE = attrs.evolve(NEEDLE_SHAPE, vocab_size=len(token_names()), max_position=MAX_POSITION)
SAME_PART = {"<end>": END, ".": END, "call": KEY, "road": LINK, "name": QUERY, "past": QUERY2}


def started_network() -> Network:
    """Return the initial network; new embeddings come from torch's global generator."""
    network = Network(SHAPE)
    state = load_model().state_dict()
    with torch.no_grad():
        network.embedding.weight.copy_(_embeddings(state["model.embed_tokens.weight"]))
        network.norm.weight.copy_(state["model.norm.weight"])
        for index, block in enumerate(network.layers()):
            weights = {
                name: state[f"model.layers.{index}.{name}.weight"]
                for name in (
                    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                    "input_layernorm", "post_attention_layernorm",
                )
            }  # fmt: skip
            q, k, v, out, gate, up, down, attention_norm, mlp_norm = weights.values()
            block.qkv.weight.copy_(torch.cat([q, k, v]))
            block.out.weight.copy_(out)
            block.gate_up.weight.copy_(torch.cat([gate, up]))
            block.down.weight.copy_(down)
            block.attention_norm.weight.copy_(attention_norm)
            block.mlp_norm.weight.copy_(mlp_norm)
    return network


def _embeddings(needle: Tensor) -> Tensor:
    """Make embeddings ``[vocabulary, hidden]`` of the new words from the needle model's."""
    words = _like(needle[list(FILLERS)], len(token_names()))
    nouns = [TOKEN_IDS[noun] for noun in NOUN_LIST]
    words[nouns] = _like(needle[list(SYMBOLS)], len(nouns))
    for word, token in SAME_PART.items():
        words[TOKEN_IDS[word]] = needle[token]
    return words


def _like(embeddings: Tensor, count: int) -> Tensor:
    """Draw ``count`` random embeddings with the mean and covariance of the given ones."""
    mean = embeddings.mean(dim=0)
    mixing = torch.randn(count, len(embeddings)) / len(embeddings) ** 0.5
    return mean + mixing @ (embeddings - mean)
