"""Apply a policy to the model of a pipeline that LangChain calls."""

from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

from kvpolicy.evaluation.needle import NeedleTask, load_model, load_tokenizer
from kvpolicy.integrations.transformers import apply_policy
from kvpolicy.policies import FastKV

model, tokenizer = load_model(), load_tokenizer()
pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=3)
llm = HuggingFacePipeline(pipeline=pipe)
prompts = NeedleTask(context_len=512).prompts(4)

right = 0
with apply_policy(model, FastKV(tsp_layer=3, tsp_rate=0.2, retention_rate=0.1)) as applied:
    for prompt in prompts:  # each call of generate gets a new cache
        answer = llm.invoke(tokenizer.decode(prompt.input_ids))
        right += answer.strip().endswith(tokenizer.decode(prompt.answer))

share = applied.reports[-1].total.share
print(f"{right} of {len(prompts)} answers right, from {share:.0%} of the cache")
