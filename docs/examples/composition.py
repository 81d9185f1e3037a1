"""Compose a policy: any scorer with any selector and any propagation policy."""

import torch

from kvpolicy import CachePolicy
from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    KeyDiffScorer,
    SumScorer,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)

# The scorer adds two scores: what the last tokens attend to, and keys unlike the others. The heads
# share a budget of a fifth of the tokens. After layer 15 half of the tokens go on.
policy = CachePolicy(
    scorer=SumScorer([WindowMaxPoolScorer(), KeyDiffScorer()], weights=[1.0, 0.01]),
    selector=AdaptiveHeadSelector(retention_rate=0.2),
    propagation=TokenSelectivePropagation(tsp_layer=15, tsp_rate=0.5),
)
print(policy)
loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
(asked,) = Needles(("word",)).questions(loaded.tokenizer, 500, 1)  # a fact hidden in documentation
cache = PolicyCache(policy)
ids = torch.tensor([asked.document_ids + asked.question_ids])
output = loaded.model.generate(ids, cache=cache, max_new_tokens=2, do_sample=False)
answer = loaded.tokenizer.decode(output[0, ids.shape[1] :])
rate = policy.prefill_compute_rate(loaded.model.config.num_hidden_layers)
print(f"{rate:.0%} of the prefill, {cache.report().total.kept:.0f} tokens kept:{answer}")
