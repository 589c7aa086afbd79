"""Context parallelism: one attention call over the ranks of a process group, on torch.distributed.

Each rank holds a part of the rows of q, k and v, its shard, and gets the same part of out:

    x = parallel.shard(tokens, group)                                    # this rank's rows of the whole
    at = parallel.positions(seqlen, group)                               # where in the whole they are
    out = parallel.attention(q, k, v, group=group, causal=True)          # local shards in, local shard out
    mine = parallel.shard(tokens, group, pad=0)                          # a length that does not divide: padded, and
    out = parallel.attention(q, k, v, group=group, seqlen=seqlen)        # said how long it is
    print(parallel.explain(q, k, v, group=group, causal=True))           # which method, and the arithmetic of it
    order = parallel.balanced(lengths, group)                            # how to pack documents, for even work
    documents = parallel.Documents(lengths, group)                       # or to deal them out, where one is most of it

Built on `flashzoo.attention`, `merge` and `attention_backward` alone: there is no kernel here. The methods are told in
`gather`, `ring`, `ulysses` and `halo`.
"""

from flashzoo.parallel.api import attention, explain
from flashzoo.parallel.documents import Documents
from flashzoo.parallel.layout import positions, shard, unshard
from flashzoo.parallel.packing import balanced, longest_across

__all__ = ["Documents", "attention", "balanced", "explain", "longest_across", "positions", "shard", "unshard"]
