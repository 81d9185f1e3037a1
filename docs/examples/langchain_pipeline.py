"""Apply a policy to the model of a pipeline that LangChain calls."""

from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import apply_policy
from kvpolicy.policies import SnapKV

loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
pipe = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer, max_new_tokens=4)
llm = HuggingFacePipeline(pipeline=pipe)

right, asked = 0, Needles(("word",)).questions(loaded.tokenizer, 300, 4)
with apply_policy(loaded.model, SnapKV(retention_rate=0.2)) as applied:
    for question in (each.question for each in asked):  # each call of generate gets a new cache
        answer = llm.invoke(f"{question.document}\n\n{question.prefix}")
        right += question.answers[0] in answer.rpartition(question.prefix)[2]

share = applied.reports[-1].total.share
print(f"{right} of {len(asked)} answers right, from {share:.0%} of the cache")
