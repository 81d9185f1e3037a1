"""Shorten a prompt for another engine: the text of the tokens that FastKV passes on.

Read the prompt once under a policy that drops tokens; `propagated` says which ones went on.
"""

import torch

from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV

loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
(asked,) = Needles(("word",)).questions(loaded.tokenizer, 500, 1)  # a fact hidden in documentation
ids = torch.tensor([asked.document_ids + asked.question_ids])

cache = PolicyCache(FastKV(tsp_rate=0.3))
with torch.no_grad(), cache.attached(loaded.model):
    loaded.model(ids, cache=cache, logits_to_keep=1)
(passed,) = cache.propagated.values()  # [batch, tokens], original positions in ascending order
short = ids[0, passed[0]]
print(loaded.tokenizer.decode(short)[-300:])

# Send this text to any server, instead of the prompt. Here the same model answers it.
answer = loaded.model.generate(short[None], max_new_tokens=2, do_sample=False)
print(f"{len(short)} of {ids.shape[1]} tokens are left; the answer is:", end="")
print(loaded.tokenizer.decode(answer[0, len(short) :]))
