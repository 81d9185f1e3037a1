"""Ask many questions about one document: read it once, give each question a copy of the cache."""

import copy

import torch

from kvpolicy.evaluation.needle import NeedleTask, load_model
from kvpolicy.evaluation.tasks.needle.vocabulary import KEY, QUERY
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import KeyDiff

model = load_model()
prompt = NeedleTask(context_len=512).prompts(1)[0].input_ids
document = torch.tensor([prompt[:-2]])  # without the question at its end

# The questions are not known yet, so choose by the keys alone, and keep half of them.
cache = PolicyCache(KeyDiff(retention_rate=0.5))
with torch.no_grad(), cache.attached(model):
    model(document, cache=cache)

right = 0
keys = [index + 1 for index, token in enumerate(prompt) if token == KEY]
for place in keys:
    question = torch.tensor([[QUERY, prompt[place]]])
    fork = copy.deepcopy(cache)  # an independent copy: no question sees another
    output = model.generate(torch.cat([document, question], dim=1), cache=fork, max_new_tokens=3)
    right += tuple(output[0, -3:].tolist()) == prompt[place + 1 : place + 4]

kept = cache.report().total
print(f"{right} of {len(keys)} answers right, from {kept.share:.0%} of the document's cache")
