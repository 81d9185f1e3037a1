"""Compose a policy: any scorer with any selector and any propagation policy."""

import torch

from kvpolicy import CachePolicy
from kvpolicy.evaluation.needle import NeedleTask, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    KeyDiffScorer,
    SumScorer,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)

# The scorer adds two scores: what the last tokens attend to, and keys unlike the others. The heads
# share a budget of a tenth of the tokens. After layer 3 a fifth of the tokens go on.
policy = CachePolicy(
    scorer=SumScorer([WindowMaxPoolScorer(), KeyDiffScorer()], weights=[1.0, 0.01]),
    selector=AdaptiveHeadSelector(retention_rate=0.1),
    propagation=TokenSelectivePropagation(tsp_layer=3, tsp_rate=0.2),
)
print(policy)
model = load_model()
prompt = NeedleTask(context_len=1024).prompts(1)[0]
cache = PolicyCache(policy)
output = model.generate(torch.tensor([prompt.input_ids]), cache=cache, max_new_tokens=3)
right = tuple(output[0, -3:].tolist()) == prompt.answer
rate = policy.prefill_compute_rate(model.config.num_hidden_layers)
print(f"{right}, {rate:.0%} of the prefill, {cache.report().total.kept:.0f} tokens kept per layer")
