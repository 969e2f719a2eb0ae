"""Kimi-K3 checkpoints as a ``TensorSource`` in memory, laid out as llama.cpp's converter does.

As a converter it fuses the residual scores, stores ``-exp(A_log)``, splits ``kv_b`` and transposes
its half for keys. Everything is F32, or ``blocks`` makes random blocks of the real files' types.
"""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from tieredmoe.gguf import Metadata, TensorInfo

PREFIX = "kimi-k3."


class MemorySource:
    """``stored`` maps names to (raw bytes, GGUF type, shape); counts what is read."""

    def __init__(self, metadata, stored):
        self.metadata = Metadata(metadata)
        self.stored = dict(stored)
        self.tensors = {
            name: TensorInfo(name, int(kind), shape, raw.size, 0, 0)
            for name, (raw, kind, shape) in self.stored.items()
        }
        self.n_read = 0

    def read(self, name):
        self.n_read += 1
        return self.stored[name][0].copy()

    def changed(self, *, metadata=(), drop=(), stored=()):
        """The same with other keys or tensors, or without some."""
        keys = {**self.metadata, **dict(metadata)}
        tensors = {**self.stored, **dict(stored)}
        return MemorySource(
            {k: v for k, v in keys.items() if k not in drop},
            {k: v for k, v in tensors.items() if k not in drop},
        )


def as_f32(values):
    values = np.ascontiguousarray(values, np.float32)
    return values.reshape(-1).view(np.uint8), T.F32, values.shape


def random_blocks(rng, kind, shape, std):
    """Random valid blocks of about this deviation: what any byte may be, without any quantiser."""
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_blocks = int(np.prod(shape)) // n_weights
    blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)

    def half(value):
        return np.full((n_blocks, 1), value, np.float16).view(np.uint8)

    if kind == T.Q2_K:
        blocks[:, 80:82], blocks[:, 82:84] = half(std / 12), half(1.5 * (std / 12))
    elif kind == T.Q3_K:
        blocks[:, 108:110] = half(std / 42)
    elif kind == T.Q6_K:
        scales = rng.integers(-16, 17, (n_blocks, 16)).astype(np.int8)
        blocks[:, 192:208], blocks[:, 208:210] = scales.view(np.uint8), half(std / 170)
    else:
        assert kind == T.Q4_0
        blocks[:, 0:2] = half(std / 4.6)
    return blocks.reshape(*shape[:-1], -1)


class Converter:
    """Fills ``stored``; with ``blocks``, a generator, ``weights`` become what these decode to."""

    def __init__(self, shape, weights, *, blocks=None):
        self.s, self.w, self.rng, self.stored = shape, weights, blocks, {}

    def convert(self):
        s = self.s
        self.matrix("token_embd.weight", "model.embed_tokens.weight", T.Q2_K)
        self.matrix("output.weight", "lm_head.weight", T.Q6_K)
        self.plain("output_norm.weight", "model.norm.weight")
        self.score("output_res_score.weight", "model.output_attn_res")
        for layer in range(s.n_layers):
            g, p = f"blk.{layer}.", f"model.layers.{layer}."
            self.plain(g + "attn_norm.weight", p + "input_layernorm.weight")
            self.plain(g + "ffn_norm.weight", p + "post_attention_layernorm.weight")
            self.score(g + "attn_res_score.weight", p + "self_attention_res")
            self.score(g + "ffn_res_score.weight", p + "mlp_res")
            (self.kda if s.is_kda(layer) else self.mla)(g, p + "self_attn.")
            self.matrix(g + "attn_output.weight", p + "self_attn.o_proj.weight", T.Q3_K)
            if layer < s.n_dense:
                self.mlp(g + "ffn_{}.weight", p + "mlp.")
            else:
                self.experts(g, p + "block_sparse_moe.")
        return self.stored

    def put(self, name, values, kind):
        """Store ``values``; give back what a reader will find."""
        if self.rng is None:
            self.stored[name] = as_f32(values)
            return values
        raw = random_blocks(self.rng, kind, values.shape, float(values.std()))
        self.stored[name] = raw.reshape(-1), kind, values.shape
        return gguf.quants.dequantize(raw, kind).reshape(values.shape).astype(np.float32)

    def matrix(self, name, source, kind):
        self.w[source] = self.put(name, self.w[source], kind)

    def plain(self, name, source):
        self.stored[name] = as_f32(self.w[source])

    def score(self, name, source):
        self.stored[name] = as_f32(
            self.w[source + "_norm.weight"] * self.w[source + "_proj.weight"][0]
        )

    def kda(self, g, p):
        for n, kind in (("q", T.Q2_K), ("k", T.Q2_K), ("v", T.Q3_K)):
            self.matrix(f"{g}attn_{n}.weight", f"{p}{n}_proj.weight", kind)
        for n in "qkv":
            raw, kind, (width, _, kernel) = as_f32(self.w[f"{p}{n}_conv1d.weight"])
            self.stored[f"{g}ssm_conv1d_{n}.weight"] = raw, kind, (1, width, 1, kernel)
        self.matrix(g + "ssm_f_a.weight", p + "f_a_proj.weight", T.Q2_K)
        self.matrix(g + "ssm_f_b.weight", p + "f_b_proj.weight", T.Q4_0)
        self.matrix(g + "ssm_beta.weight", p + "b_proj.weight", T.Q2_K)
        self.stored[g + "ssm_a"] = as_f32(-np.exp(self.w[p + "A_log"]))
        self.plain(g + "ssm_dt.bias", p + "dt_bias")
        self.matrix(g + "ssm_g.weight", p + "g_proj.weight", T.Q2_K)
        self.plain(g + "ssm_norm.weight", p + "o_norm.weight")

    def mla(self, g, p):
        s = self.s
        self.matrix(g + "attn_q_a.weight", p + "q_a_proj.weight", T.Q2_K)
        self.plain(g + "attn_q_a_norm.weight", p + "q_a_layernorm.weight")
        self.matrix(g + "attn_q_b.weight", p + "q_b_proj.weight", T.Q2_K)
        self.matrix(g + "attn_kv_a_mqa.weight", p + "kv_a_proj_with_mqa.weight", T.Q2_K)
        self.plain(g + "attn_kv_a_norm.weight", p + "kv_a_layernorm.weight")
        kv_b = self.w[p + "kv_b_proj.weight"].reshape(s.heads, -1, s.kv_rank)
        keys = np.ascontiguousarray(kv_b[:, : s.own_dim].transpose(0, 2, 1))
        keys = self.put(g + "attn_k_b.weight", keys, T.Q4_0)
        values = self.put(g + "attn_v_b.weight", np.ascontiguousarray(kv_b[:, s.own_dim :]), T.Q2_K)
        kv_b = np.concatenate([keys.transpose(0, 2, 1), values], 1)
        self.w[p + "kv_b_proj.weight"] = kv_b.reshape(-1, s.kv_rank)
        self.matrix(g + "attn_gate.weight", p + "g_proj.weight", T.Q2_K)

    def mlp(self, name, p):
        for n, kind in (("gate", T.Q2_K), ("up", T.Q2_K), ("down", T.Q3_K)):
            self.matrix(name.format(n), f"{p}{n}_proj.weight", kind)

    def experts(self, g, p):
        self.plain(g + "ffn_gate_inp.weight", p + "gate.weight")
        self.plain(g + "exp_probs_b.bias", p + "gate.e_score_correction_bias")
        for n, w, kind in (("gate", "w1", T.Q2_K), ("up", "w3", T.Q2_K), ("down", "w2", T.Q3_K)):
            names = [f"{p}experts.{e}.{w}.weight" for e in range(self.s.n_experts)]
            stacked = np.stack([self.w[name] for name in names])
            self.w |= dict(
                zip(names, self.put(f"{g}ffn_{n}_exps.weight", stacked, kind), strict=True)
            )
        self.matrix(g + "ffn_routed_down.weight", p + "routed_expert_down_proj.weight", T.Q2_K)
        self.matrix(g + "ffn_routed_up.weight", p + "routed_expert_up_proj.weight", T.Q2_K)
        self.plain(g + "ffn_routed_norm.weight", p + "routed_expert_norm.weight")
        self.mlp(g + "ffn_{}_shexp.weight", p + "shared_experts.")


def metadata(s):
    """What a converter writes of a model of this shape."""
    keys = {
        "block_count": s.n_layers,
        "context_length": s.context,
        "embedding_length": s.hidden,
        "feed_forward_length": s.dense_width,
        "attention.head_count": s.heads,
        "attention.head_count_kv": [0 if s.is_kda(layer) else 1 for layer in range(s.n_layers)],
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": s.eps,
        "expert_count": s.n_experts,
        "expert_used_count": s.top_k,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "attention.key_length": s.kv_rank + s.shared_dim,
        "attention.value_length": s.kv_rank,
        "vocab_size": s.vocab,
        "ssm.conv_kernel": s.kernel,
        "kda.head_dim": s.kda_dim,
        "kda.gate_lower_bound": s.bound,
        "attention.q_lora_rank": s.q_rank,
        "attention.kv_lora_rank": s.kv_rank,
        "rope.dimension_count": s.shared_dim,
        "attention.key_length_mla": s.own_dim + s.shared_dim,
        "attention.value_length_mla": s.value_dim,
        "expert_feed_forward_length": s.width,
        "expert_shared_count": s.n_shared,
        "leading_dense_block_count": s.n_dense,
        "expert_weights_scale": s.scale,
        "expert_weights_norm": True,
        "expert_latent_length": s.latent,
        "activation.situ_beta": s.beta,
        "activation.situ_linear_beta": s.linear_beta,
        "attn_res.block_size": s.block,
    }
    return {"general.architecture": "kimi-k3", **{PREFIX + k: v for k, v in keys.items()}}


def source_of(shape, weights, *, blocks=None):
    """The source of a checkpoint; with ``blocks``, ``weights`` become what these decode to."""
    return MemorySource(metadata(shape), Converter(shape, weights, blocks=blocks).convert())
