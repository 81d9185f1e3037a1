"""Ask a document many questions: it is read once, and every question gets a fork of the cache."""

import copy

import torch

from kvpolicy.evaluation.needle import NeedleTask, load_model
from kvpolicy.evaluation.tasks.needle.vocabulary import KEY, QUERY
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import KeyDiff

model = load_model()
prompt = NeedleTask(context_len=512).prompts(1)[0].input_ids
document = torch.tensor([prompt[:-2]])  # without the question at its end

# What will be asked is not known yet, so that a rule that looks at keys alone, and keeps half.
cache = PolicyCache(KeyDiff(retention_rate=0.5))
with torch.no_grad(), cache.attached(model):
    model(document, past_key_values=cache)

right = 0
keys = [index + 1 for index, token in enumerate(prompt) if token == KEY]
for place in keys:
    question = torch.tensor([[QUERY, prompt[place]]])
    fork = copy.deepcopy(cache)  # the next question finds the document as it was read
    output = model.generate(
        torch.cat([document, question], dim=1), past_key_values=fork, max_new_tokens=3
    )
    right += tuple(output[0, -3:].tolist()) == prompt[place + 1 : place + 4]

kept = cache.report().total
print(f"{right} of {len(keys)} answers right, from {kept.share:.0%} of the document's cache")
