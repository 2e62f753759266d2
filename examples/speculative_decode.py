#!/usr/bin/env python3
"""Speculative decoding with draft trees on a DeepSeek-V3 model, token for token what the model's own generate() says.

    pip install . torch transformers
    python examples/speculative_decode.py                     # 64 prompts x 128 tokens, checked against generate()
    python examples/speculative_decode.py --sample            # lossless sampling in place of greedy decoding
    python examples/speculative_decode.py --device cuda --steps-log

The model is Hugging Face's DeepseekV3ForCausalLM, small, with random weights from a fixed seed. Only its attention is replaced:
by the absorbed form on TreeMLA over a paged cache. A step of all requests at once:

    draft     what followed earlier occurrences of a request's last tokens scores the next positions: a drafter that costs nothing
    build     treemla.build_tree: the tree with the largest sum of path probabilities
    verify    one forward pass over all nodes; each layer writes the nodes' rows behind the prefix and runs the step's plan
    accept    treemla.accept_path: from the root down while drafted tokens are what the model says, then one token more
    compact   treemla.compact_cache: accepted rows move together, in every layer

Exit code 0: equal (or --sample), 1: the first difference is shown, with how close the two candidates' logits were.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, set_seed
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import treemla

PAGE_SIZE = 16


def make_model(device: str, *, vocab: int = 256, layers: int = 3, heads: int = 8, seed: int = 0) -> DeepseekV3ForCausalLM:
    """DeepSeek-V3's architecture (MLA 512/64, YaRN, shared and routed experts), with as many heads as a rank of 8 may have."""
    set_seed(seed)
    config = DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.06,  # wide enough for attention to matter
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return DeepseekV3ForCausalLM(config).to(device, torch.float32).eval()


class Step:
    """What all layers share in a step: where nodes are written, and the plan."""

    def __init__(self) -> None:
        self.planner = treemla.Planner()
        self.slots: torch.Tensor = torch.empty(0)  # [total_q] rows of the pool that the nodes are written to
        self.keywords: dict = {}
        self.planned = False


class TreeMlaAttention(torch.nn.Module):
    """Takes the place of a DeepseekV3Attention, with its weights. Queries are absorbed: W_UK moves from the keys to them."""

    def __init__(self, old: deepseek.DeepseekV3Attention, pool: torch.Tensor, step: Step):
        super().__init__()
        self.old, self.pool, self.step = old, pool, step  # pool: [num_pages, PAGE_SIZE, d_qk]
        self.d_v = old.kv_lora_rank
        weights = old.kv_b_proj.weight.view(old.num_heads, old.qk_nope_head_dim + old.v_head_dim, self.d_v)
        self.w_uk, self.w_uv = weights.split([old.qk_nope_head_dim, old.v_head_dim], dim=1)  # [h, nope, d_v], [h, v, d_v]

    def forward(self, hidden_states, position_embeddings, *_, **__):
        old, step = self.old, self.step
        total_q = hidden_states.shape[1]  # the batch is one row of all requests' nodes
        q = old.q_b_proj(old.q_a_layernorm(old.q_a_proj(hidden_states)))
        q = q.view(1, total_q, old.num_heads, old.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = q.split([old.qk_nope_head_dim, old.qk_rope_head_dim], dim=-1)
        latent, k_rope = old.kv_a_proj_with_mqa(hidden_states).split([self.d_v, old.qk_rope_head_dim], dim=-1)
        rotate = deepseek.apply_rotary_pos_emb_interleave
        q_rope, k_rope = rotate(q_rope, k_rope.view(1, 1, total_q, -1), *position_embeddings)
        rows = torch.cat([old.kv_a_layernorm(latent)[0], k_rope[0, 0]], dim=-1)
        self.pool.view(-1, rows.shape[-1])[step.slots] = rows
        q_latent = torch.einsum("htn,hnv->thv", q_nope[0], self.w_uk)
        q = torch.cat([q_latent, q_rope[0].transpose(0, 1)], dim=-1)  # [total_q, h, d_qk]
        if not step.planned:  # the first layer of a step
            step.planner.plan(q, self.pool, sm_scale=old.scaling, **step.keywords)
            step.planned = True
        out, _ = step.planner.run(q, self.pool)
        out = torch.einsum("thl,hvl->thv", out, self.w_uv).reshape(1, total_q, -1)
        return old.o_proj(out), None


class Decoder:
    """Decodes b requests of the model, whose attention it replaces."""

    def __init__(self, model: DeepseekV3ForCausalLM, b: int, max_len: int, budget: int, depths: int, sample: bool = False):
        config, self.device = model.config, model.device
        self.model, self.budget, self.depths, self.sample = model, budget, depths, sample
        self.vocab = config.vocab_size
        pages = -(-(max_len + budget + 1) // PAGE_SIZE)
        # Page 0 is nobody's: finished requests write their rows there. The others are dealt in random order.
        order = torch.randperm(b * pages, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = order.view(b, pages).to(self.device, torch.int32)
        d_qk = config.kv_lora_rank + config.qk_rope_head_dim
        shape = (b * pages + 1, PAGE_SIZE, d_qk)
        self.step = Step()
        self.pools = [torch.full(shape, float("nan"), device=self.device) for _ in range(config.num_hidden_layers)]
        for pool in self.pools:
            pool[0] = 0
        for layer, pool in zip(model.model.layers, self.pools):
            layer.self_attn = TreeMlaAttention(layer.self_attn, pool, self.step)

    def restore(self) -> None:
        """Gives the model its own attention back."""
        for layer in self.model.model.layers:
            layer.self_attn = layer.self_attn.old

    def forward(self, tokens, positions, q_indptr, kv_len, request, index, tree):
        """Logits [total_q, vocab]. Node i is row `index[i]` of the logical cache of request[i]; a kv_len of 0 is inert."""
        page = self.page_table[request, index // PAGE_SIZE].long()
        slots = page * PAGE_SIZE + index % PAGE_SIZE
        self.step.slots = torch.where(kv_len[request] > 0, slots, torch.zeros_like(slots))
        self.step.keywords = {"q_indptr": q_indptr, "kv_len": kv_len, "page_table": self.page_table, "tree": tree}
        self.step.planned = False
        return self.model(
            input_ids=tokens[None].clamp(min=0).long(), position_ids=positions[None].long(), use_cache=False
        ).logits[0]

    def draft(self, histories: list[list[int]]) -> torch.Tensor:
        """Logits [b, depths, vocab]: the tokens that came d after earlier occurrences of the last two tokens, or of the last."""
        counts = torch.full((len(histories), self.depths, self.vocab), 1e-3)
        for r, history in enumerate(histories):
            for length, weight in ((2, 10.0), (1, 1.0)):
                tail = history[-length:]
                for j in range(len(history) - length):
                    if history[j : j + length] == tail:
                        for d, token in enumerate(history[j + length : j + length + self.depths]):
                            counts[r, d, token] += weight
        return counts.log().to(self.device)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], new_tokens: int, seeds: torch.Tensor | None = None, log: bool = False):
        """The new tokens of each prompt, and statistics."""
        b, device = len(prompts), self.device
        ints = {"dtype": torch.int32, "device": device}
        lengths = [len(p) for p in prompts]
        # Prefill: each prompt is a chain. Its last token's row says what comes first.
        q_indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], **ints)
        request = torch.repeat_interleave(torch.arange(b, device=device), torch.tensor(lengths, device=device))
        index = torch.cat([torch.arange(n, device=device) for n in lengths])
        tokens = torch.tensor([t for p in prompts for t in p], **ints)
        logits = self.forward(tokens, index, q_indptr, torch.tensor(lengths, **ints), request, index, "causal")
        last = logits[q_indptr[1:].long() - 1]
        one = torch.arange(b + 1, **ints)
        offsets = torch.zeros(b, dtype=torch.int64, device=device)
        seeds = torch.arange(b, dtype=torch.int64) if seeds is None else seeds
        sampling = {"method": "deterministic", "seeds": seeds.to(device)} if self.sample else {"method": "greedy"}
        root = treemla.accept_path(
            torch.zeros(b, **ints), q_indptr=one, parents=torch.full((b,), -1, **ints), logits=last.contiguous(),
            path_len=1, **sampling, **({"offsets": offsets} if self.sample else {}),
        ).bonus_token  # fmt: skip
        histories = [p + [t] for p, t in zip(prompts, root.tolist())]
        prefix = torch.tensor(lengths, **ints)

        q_len = self.budget + 1
        q_indptr = torch.arange(0, b * q_len + 1, q_len, **ints)
        request = torch.arange(b, device=device).repeat_interleave(q_len)
        node = torch.arange(q_len, device=device).repeat(b)
        stats = {"steps": 0, "accepted": 0, "live": 0, "seconds": 0.0}
        done = [len(h) - n >= new_tokens for h, n in zip(histories, lengths)]
        while not all(done):
            begin = time.perf_counter()
            live = torch.tensor([not d for d in done], device=device)
            tree = treemla.build_tree(self.draft(histories), self.budget, root_tokens=root, prefix_len=prefix)
            tokens, parents = tree.token_ids.reshape(-1), tree.parents.reshape(-1)
            kv_len = torch.where(live, prefix + q_len, 0).to(torch.int32)
            index = torch.where(live[request], prefix[request].long() + node, 0)
            logits = self.forward(tokens, tree.positions.reshape(-1), q_indptr, kv_len, request, index, parents)
            if self.sample:
                sampling["offsets"] = torch.tensor([len(h) for h in histories], device=device)
            accepted = treemla.accept_path(
                tokens, q_indptr=q_indptr, parents=parents, logits=logits, path_len=self.depths + 1, **sampling
            )
            compacted = treemla.compact_cache(
                self.pools, q_indptr=q_indptr, kv_len=kv_len, accept_index=accepted.accept_index,
                num_accepted=accepted.num_accepted, total_q=b * q_len, page_table=self.page_table, page_size=PAGE_SIZE,
            )  # fmt: skip
            prefix = torch.where(live, compacted.kv_len, prefix)
            root = torch.where(live, accepted.bonus_token, root)
            counts = accepted.num_accepted.tolist()
            emitted = tokens[accepted.accept_index.clamp(min=0).long()].tolist()
            for r, (n, bonus) in enumerate(zip(counts, accepted.bonus_token.tolist())):
                if not done[r]:
                    histories[r] += emitted[r][1 : n + 1] + [bonus]
                    stats["accepted"] += n
                    stats["live"] += 1
                    done[r] = len(histories[r]) - lengths[r] >= new_tokens
            stats["steps"] += 1
            seconds = time.perf_counter() - begin
            stats["seconds"] += seconds
            if log:
                print(f"step {stats['steps']:3d}: {sum(map(int, live.tolist())):3d} requests, accepted {sum(counts):3d}, "
                      f"{seconds * 1e3:.1f} ms")  # fmt: skip
        return [h[n : n + new_tokens] for h, n in zip(histories, lengths)], stats


@torch.no_grad()
def reference(model: DeepseekV3ForCausalLM, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What the model's own generate() says, greedily; prompts of one length at a time, so that none is padded."""
    results: dict[int, list[int]] = {}
    for length in sorted({len(p) for p in prompts}):
        picked = [i for i, p in enumerate(prompts) if len(p) == length]
        ids = torch.tensor([prompts[i] for i in picked], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
        results |= dict(zip(picked, out[:, length:].tolist()))
    return [results[i] for i in range(len(prompts))]


@torch.no_grad()
def show_difference(model, prompt: list[int], got: list[int], want: list[int]) -> None:
    at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
    ids = torch.tensor([prompt + want[:at]], device=model.device)
    logits = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0, -1].double(), dim=-1)
    print(f"  token {at}: {got[at]} in place of {want[at]}; log-probabilities {logits[got[at]]:.9f}, {logits[want[at]]:.9f}")


def make_prompts(count: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab, (12 + 4 * (i % 4),), generator=generator).tolist() for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--budget", type=int, default=8, help="drafted nodes of a tree")
    parser.add_argument("--depths", type=int, default=5, help="tokens that the drafter looks ahead")
    parser.add_argument("--sample", action="store_true", help="sample losslessly at temperature 1; nothing to compare with")
    parser.add_argument("--steps-log", action="store_true", help="a line a step")
    options = parser.parse_args()

    model = make_model(options.device)
    prompts = make_prompts(options.prompts, model.config.vocab_size)
    want = None
    if not options.sample:
        begin = time.perf_counter()
        want = reference(model, prompts, options.tokens)
        print(f"generate(): {options.prompts} prompts x {options.tokens} tokens in {time.perf_counter() - begin:.1f} s")
    max_len = max(map(len, prompts)) + options.tokens + options.depths + 1
    decoder = Decoder(model, len(prompts), max_len, options.budget, options.depths, options.sample)
    got, stats = decoder.generate(prompts, options.tokens, log=options.steps_log)
    decoder.restore()
    print(f"TreeMLA: {options.prompts} prompts x {options.tokens} tokens in {stats['seconds']:.1f} s on {options.device}, "
          f"backend {decoder.step.planner.backend}")  # fmt: skip
    print(f"acceptance length {1 + stats['accepted'] / max(stats['live'], 1):.2f} tokens a step of a request, "
          f"{stats['steps']} steps, {1e3 * stats['seconds'] / max(stats['steps'], 1):.1f} ms a step")  # fmt: skip
    if want is None:
        return 0
    wrong = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
    print(f"equal token for token: {len(got) - len(wrong)} of {len(got)} prompts")
    for i in wrong[:5]:
        print(f"prompt {i}:")
        show_difference(model, prompts[i], got[i], want[i])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
