"""A chat of several turns: the policy acts on each new message; answers are appended."""

from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import Conversation
from kvpolicy.policies import SnapKV

loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
chat = Conversation(loaded.model, loaded.tokenizer, SnapKV(retention_rate=0.25))
# Each message is a page of Python's documentation that hides a fact, with a question for it.
messages = Needles(("word",)).questions(loaded.tokenizer, 250, 3)
for turn, question in enumerate((each.question for each in messages), start=1):
    text = f"{question.document}\n\n{question.question}"
    answer = chat.ask(text, max_new_tokens=12, do_sample=False)
    held = chat.cache.report().total
    print(f"turn {turn}: {answer}, {held.kept:.0f} of {held.seen} tokens held")
