"""Shorten a prompt for another engine: the text of the tokens that FastKV passes on.

Read the prompt once under a policy that drops tokens; `propagated` says which ones went on.
"""

import torch

from kvpolicy.evaluation import load, needle_prompts
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV

loaded = load("needle")  # or the name of a model on the Hub
prompt = needle_prompts(context_len=512, count=2)[0]
ids = torch.tensor([prompt.input_ids])

policy = FastKV(0.1, tsp_rate=0.2, tsp_layer=default_tsp_layer("needle"))
cache = PolicyCache(policy)
with torch.no_grad(), cache.attached(loaded.model):
    loaded.model(ids, cache=cache, logits_to_keep=1)
(passed,) = cache.propagated.values()  # [batch, tokens], original positions in ascending order
short = ids[0, passed[0]]
print(loaded.tokenizer.decode(short)[-200:])

# Send this text to any server, instead of the prompt. Here the same model answers it.
answer = loaded.model.generate(short[None], max_new_tokens=prompt.max_new_tokens, do_sample=False)
right = prompt.is_match(answer[0, len(short) :].tolist())
print(f"{len(short)} of {ids.shape[1]} tokens are left; the answer is right: {right}")
