"""A chat of several turns: the policy acts on each new prompt; answers are appended."""

import torch

from kvpolicy.evaluation.needle import NeedleTask, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV

model = load_model()
cache = PolicyCache(SnapKV(retention_rate=0.25))
conversation = torch.empty(1, 0, dtype=torch.int64)
for turn, prompt in enumerate(NeedleTask(context_len=256).prompts(3), start=1):
    said = torch.tensor([prompt.input_ids])
    # Pass the whole conversation, as with any cache of Transformers; generate reads the new part.
    conversation = torch.cat([conversation, said], dim=1)
    conversation = model.generate(conversation, cache=cache, max_new_tokens=3)
    right = tuple(conversation[0, -3:].tolist()) == prompt.answer
    held = cache.report().total
    print(f"turn {turn}: {right}, {held.kept:.0f} of {held.seen} tokens held")
