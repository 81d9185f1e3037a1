"""Write a scorer, check it against the contract, and use it on a prompt."""

import attrs
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.evaluation.needle import NeedleTask, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation
from kvpolicy.testing import check_scorer


@attrs.frozen
class LastQueryMaximum(Scorer):
    """Keep the tokens that any query head of the last token attends to."""

    @property
    def num_queries(self) -> int:
        """One: the last query."""
        return 1

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``."""
        queries = context.queries[:, :, -1].float().unflatten(1, (context.kv_heads, -1))
        products = torch.einsum("bhgd,bhkd->bhgk", queries, context.keys.float())
        return products.amax(dim=2)  # over the query heads of a group


check_scorer(LastQueryMaximum())  # padding, turns, shares of heads; raises what is wrong
model = load_model()
prompt = NeedleTask(context_len=1024).prompts(1)[0]
policy = CachePolicy(LastQueryMaximum(), GQAGroupSelector(0.1), PassAllPropagation())
cache = PolicyCache(policy)
output = model.generate(torch.tensor([prompt.input_ids]), cache=cache, max_new_tokens=3)
kept = cache.report().total.share
print(f"{tuple(output[0, -3:].tolist()) == prompt.answer}, {kept:.1%} of the cache kept")
