"""Ask many questions about one document: read it once, give each question a copy of the cache."""

import copy
from pydoc_data.topics import topics

import torch

from kvpolicy.evaluation import Asker, Question, load
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import ReplayKV

loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
model, tokenizer = loaded.model, loaded.tokenizer
facts = {"Paris": "4322492", "Rome": "7716035", "Oslo": "2950148"}
sentences = " ".join(topics["assignment"].split()[:250]).split(". ")
for at, (place, number) in enumerate(facts.items(), start=1):  # hidden in Python's documentation
    hidden = f"The special magic number of {place} is {number}"
    sentences.insert(at * len(sentences) // 5, hidden)
document = ". ".join(sentences)

cache, right = PolicyCache(ReplayKV(retention_rate=0.2)), 0
for place, number in facts.items():
    question = f"What is the special magic number of {place}?"
    prefix = f"The special magic number of {place} is"  # how the model's reply begins
    # The chat template's beginning and the document, then the question and the template's end.
    asked = Asker(tokenizer).ask(Question(document, question, (number,), "fact", prefix=prefix))
    read = torch.tensor([asked.document_ids])
    if not cache.get_seq_length():  # the policy chooses without any question
        with torch.no_grad(), cache.attached(model):
            model(read, cache=cache)
        kept = cache.report().total.share
    fork = copy.deepcopy(cache)  # an independent copy: no question sees another
    ids = torch.cat([read, torch.tensor([asked.question_ids])], dim=1)
    with fork.appending():  # the question is kept whole
        output = model.generate(ids, cache=fork, max_new_tokens=9, do_sample=False)
    right += number in tokenizer.decode(output[0, ids.shape[1] :])
print(f"{right} of {len(facts)} answers right, from {kept:.0%} of the document's cache")
