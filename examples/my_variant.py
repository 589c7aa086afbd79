"""A variant of your own: online softmax over blocks of keys, in torch.
`flashzoo check examples/my_variant.py` tests it."""

import torch

import flashzoo
from flashzoo.autograd import differentiable

BLOCK_KV = 64
FEATURES = frozenset({"causal", "window", "gqa", "cross", "head_dim_v", "mla", "lse", "deterministic"})  # and no other


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def forward(q, k, v, problem, operands):  # (batch, seqlen, heads, head_dim) in
    q_h, k_h, v_h = (x.transpose(1, 2).float().repeat_interleave(problem.heads // x.shape[2], 1) for x in (q, k, v))
    left, right = (torch.inf if side is None else side for side in problem.span)
    diagonal = torch.arange(problem.seqlen_q, device=q.device)[:, None] + problem.offset
    m_i, l_i, acc = (q_h.new_full((*q_h.shape[:3], n), x) for n, x in ((1, -torch.inf), (1, 0), (v.shape[3], 0)))
    positions = torch.arange(problem.seqlen_k, device=q.device)
    for keys, k_j, v_j in zip(positions.split(BLOCK_KV), k_h.split(BLOCK_KV, 2), v_h.split(BLOCK_KV, 2), strict=True):
        s = q_h @ k_j.mT * problem.scale
        s = s.masked_fill((keys - diagonal < -left) | (keys - diagonal > right), -torch.inf)
        m_new = m_i.maximum(s.detach().amax(-1, True))  # the result does not depend on it, so it needs no gradient
        shift = m_new.masked_fill(m_new == -torch.inf, 0)
        p, alpha = torch.exp(s - shift), torch.exp(m_i - shift)
        l_i, acc, m_i = l_i * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ v_j, m_new
    blind = l_i == 0
    l_i = l_i.masked_fill(blind, 1)
    lse = (m_i + l_i.log()).masked_fill(blind, -torch.inf).squeeze(-1)
    return (acc / l_i).transpose(1, 2).to(q.dtype), lse  # out alike, as wide as v, lse (batch, heads, seqlen_q)


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def backward(dout, dlse, q, k, v, out, lse, problem, operands):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():  # keeps nothing: runs forward again, recorded by autograd
        outputs = forward(q, k, v, problem, operands)
    return torch.autograd.grad(outputs, (q, k, v), (dout, torch.zeros_like(lse) if dlse is None else dlse))


attention = differentiable(forward, backward)
SPEC = flashzoo.Spec(
    name="my_variant",
    title="online softmax over blocks of keys, in torch",
    paper="Milakov and Gimelshein 2018, arXiv:1805.02867",
    impl=f"{__name__}:attention",
    dtypes=("fp16", "bf16", "fp32"),
    cpu_dtypes=("fp16", "bf16", "fp32"),
    features=FEATURES,
    backward=FEATURES,
    auto=(),
    memory="quadratic",  # the recorded forward pass keeps P, block by block
    faults=(("cuda", "test_gradients[my_variant-large_scores", "torch sums scores of 1e5 term by term in float32"),),
)
flashzoo.register(SPEC)

if __name__ == "__main__":
    print(flashzoo.compare(*(torch.randn(1, 200, 2, 64) for _ in "qkv"), causal=True, backward=True))
