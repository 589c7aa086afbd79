"""A small Llama-like model with random weights writes tokens, its keys and values in pages:
the same tokens as without a cache?

    python examples/generate.py  # `decode` on a paged cache, beside torch's sdpa on a static one
    python examples/generate.py --dtype bf16 --layers 16 --hidden 2048 --heads 32 --heads-kv 8 --new 256

Each sequence has a prompt of its own length. The prompts go through the model once, their keys and values into pages
that lie in any order (`flashzoo.append`). Then one token after the other: its keys and values are appended, and one
query attends to all that is there. Greedy tokens are held to those of the model without a cache, which sees all of a
sequence anew for every token. In float32 they are the same; in 16 bits two logits may lie closer together than their
roundings. The exit status is 0 where they are, else 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashzoo

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Linear = partial(nn.Linear, bias=False)


class NoCache:
    """All of a sequence is seen anew for every token."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        """Of all tokens; `used` is 0."""
        return flashzoo.attention(q, k, v, causal=True, version="sdpa")


class Paged:
    """Keys and values of each layer in pages, which each sequence has some of, in any order."""

    def __init__(self, args: argparse.Namespace) -> None:
        pages = -(-args.longest // args.page_size)
        order = torch.randperm(args.batch * pages, generator=torch.Generator().manual_seed(args.seed))
        self.table = order.view(args.batch, pages).int().to(args.device)
        shape = (args.layers, 2, args.batch * pages, args.page_size, args.heads_kv, args.hidden // args.heads)
        self.pages = torch.empty(shape, dtype=DTYPES[args.dtype], device=args.device)
        self.version = args.version

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        """New tokens behind `used` that are there."""
        k_pages, v_pages = self.pages[layer]
        flashzoo.append(k_pages, v_pages, k, v, used, page_table=self.table)
        how = {"page_table": self.table, "seqused_k": used + q.shape[1], "causal": True}
        return flashzoo.attention(q, k_pages, v_pages, **how, version=self.version)


class Static:
    """One tensor of keys for each layer and one of values, with a row for every token that may come,
    by torch's sdpa."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = (args.layers, 2, args.batch, args.longest, args.heads_kv, args.hidden // args.heads)
        self.rows = torch.zeros(shape, dtype=DTYPES[args.dtype], device=args.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        """New tokens behind `used` that are there, by a mask."""
        cache, new = self.rows[layer], q.shape[1]
        at = used[:, None] + torch.arange(new, device=q.device)
        for rows, x in zip(cache, (k, v), strict=True):
            rows[torch.arange(len(q), device=q.device)[:, None], at] = x
        seen = (torch.arange(cache.shape[2], device=q.device) <= at[..., None])[:, None]
        turned = (x.transpose(1, 2) for x in (q, *cache))
        return F.scaled_dot_product_attention(*turned, attn_mask=seen, enable_gqa=True).transpose(1, 2)


class Layer(nn.Module):
    """Attention with rotary positions and grouped heads, and a gated MLP, each behind a norm and added to
    `(batch, seqlen, hidden)`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.head_dim = args.heads + 2 * args.heads_kv, args.hidden // args.heads
        self.split = (args.heads, args.heads_kv, args.heads_kv)
        self.norm_1, self.norm_2 = nn.RMSNorm(args.hidden), nn.RMSNorm(args.hidden)
        self.qkv, self.project = Linear(args.hidden, self.heads * self.head_dim), Linear(args.hidden, args.hidden)
        self.gate, self.up, self.down = (
            Linear(*sizes) for sizes in [(args.hidden, 3 * args.hidden)] * 2 + [(3 * args.hidden, args.hidden)]
        )

    def forward(self, x: Tensor, layer: int, cache: NoCache | Paged | Static, used: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (self.heads, self.head_dim)).split(self.split, 2)
        at = used[:, None] + torch.arange(x.shape[1], device=x.device)
        out = cache.attend(layer, rotary(q, at), rotary(k, at), v, used)
        x = x + self.project(out.flatten(2))
        return x + self.down(F.silu(self.gate(self.norm_2(x))) * self.up(self.norm_2(x)))


def rotary(x: Tensor, at: Tensor) -> Tensor:
    """x `(batch, seqlen, heads, head_dim)` turned by its rows' positions (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angle = at[..., None, None] * 1e4 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.float().split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Model(nn.Module):
    """Tokens `(batch, seqlen)` to the logits of each next one `(batch, seqlen, vocabulary)`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(args.vocabulary, args.hidden), nn.RMSNorm(args.hidden)
        # No part of the embedding, by which a model with random weights would write its last token for ever,
        # whatever came before.
        self.head = Linear(args.hidden, args.vocabulary)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))

    def forward(self, ids: Tensor, cache: NoCache | Paged | Static, used: Tensor) -> Tensor:
        x = self.tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, cache, used)
        return self.head(self.norm(x))


def generate(model: Model, cache: Paged | Static, prompts: list[Tensor], new: int) -> tuple[Tensor, float]:
    """So many new tokens of each prompt `(batch, new)`, the most likely one each time;
    and new tokens a second, the prompts left out."""
    device, last = prompts[0].device, []
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
    for i, prompt in enumerate(prompts):  # one after the other: the cache has rows for all of them
        last.append(model(prompt[None], _of_one(cache, i), torch.zeros_like(lengths[:1]))[0, -1].argmax())
    found, used, begin = [torch.stack(last)], lengths, now(device)
    for _ in range(new - 1):
        logits = model(found[-1][:, None], cache, used)
        found.append(logits[:, -1].argmax(-1))
        used = used + 1
    return torch.stack(found, 1), len(prompts) * (new - 1) / (now(device) - begin)


def _of_one(cache: Paged | Static, i: int) -> Paged | Static:
    """The cache of the i-th sequence alone."""
    one = object.__new__(type(cache))
    one.__dict__ = dict(vars(cache))
    if isinstance(one, Paged):
        one.table = one.table[i : i + 1]
    else:
        one.rows = one.rows[:, :, i : i + 1]
    return one


def without_cache(model: Model, prompts: list[Tensor], new: int) -> Tensor:
    """The same tokens, all of a sequence seen anew for each."""
    found = []
    for prompt in prompts:
        ids = prompt
        for _ in range(new):
            ids = torch.cat([ids, model(ids[None], NoCache(), torch.zeros_like(ids[:1]))[0, -1:].argmax(-1)])
        found.append(ids[len(prompt) :])
    return torch.stack(found)


def now(device: torch.device) -> float:
    """Seconds, all that the GPU was given being done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked; `longest` is as long as a sequence gets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "batch": 3,
        "prompt": 40,
        "new": 24,
        "layers": 2,
        "hidden": 128,
        "heads": 8,
        "heads_kv": 2,
        "vocabulary": 512,
    }
    for name, default in {**sizes, "page_size": 16, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--version", default="decode", help="that attends to the paged cache; default: decode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    args = parser.parse_args(argv)
    if args.hidden % args.heads or args.hidden // args.heads % 2:
        parser.error(f"--hidden: expected an even multiple of --heads {args.heads}, got {args.hidden}")
    if args.heads % args.heads_kv:
        parser.error(f"--heads: expected a multiple of --heads-kv {args.heads_kv}, got {args.heads}")
    args.longest = args.prompt + args.new
    return args


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Generate three times, compare, report. Returns the exit status."""
    args = arguments(argv)
    torch.manual_seed(args.seed)
    model = Model(args).to(args.device, DTYPES[args.dtype])
    lengths = [max(1, args.prompt * (i + 1) // args.batch) for i in range(args.batch)]
    prompts = [torch.randint(args.vocabulary, (length,), device=args.device) for length in lengths]
    expected = without_cache(model, prompts, args.new)
    print(
        f"{args.layers} layers, hidden {args.hidden}, heads {args.heads}:{args.heads_kv}, {args.dtype}, {args.device}"
    )
    print(f"prompts of {', '.join(map(str, lengths))} tokens, {args.new} new ones of each")
    different = 0
    for name, cache in ((f"{args.version}, pages of {args.page_size}", Paged(args)), ("sdpa, static", Static(args))):
        found, speed = generate(model, cache, prompts, args.new)
        wrong = int((found != expected).any(1).sum())
        different += wrong
        same = (
            "the tokens of no cache" if not wrong else f"{wrong} of {args.batch} sequences part from those of no cache"
        )
        print(f"{name:24}{speed:10.0f} tokens/s   {same}")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
