"""A float64 Kimi-K3 in numpy, written from the published formulas, one method per formula.

Wrong variants are made by overriding one method, so a test can show that it would notice them.
Weights go by the checkpoint's names; ``random_weights`` makes each term visible in the logits.
"""

import attrs
import numpy as np

UNIT_EPS = 1e-6  # of queries' and keys' lengths: added to the sum of squares


@attrs.frozen
class K3Shape:
    """Sizes of a small model; the defaults are odd on purpose, so that a mixed-up axis shows.

    Neither kind of attention is as wide as the hidden size, heads differ in number, the last block
    of the residuals is a partial one, and the last layer has full attention off the pattern.
    """

    n_layers: int = 8
    vocab: int = 256
    hidden: int = 128
    eps: float = 1e-5
    mla_layers: tuple[int, ...] = (3, 6, 7)
    block: int = 3
    kda_heads: int = 5
    kda_dim: int = 32
    kernel: int = 4
    bound: float = -5.0
    heads: int = 4
    q_rank: int = 48
    kv_rank: int = 32
    own_dim: int = 24
    shared_dim: int = 16
    value_dim: int = 28
    n_dense: int = 1
    dense_width: int = 224
    n_experts: int = 16
    top_k: int = 4
    n_shared: int = 2
    width: int = 80
    latent: int = 64
    scale: float = 1.0
    beta: float = 4.0
    linear_beta: float = 25.0
    context: int = 4096

    def is_kda(self, layer):
        return layer not in self.mla_layers


def weight_shapes(s):
    """Every parameter of the checkpoint, in its order."""
    H, D, F = s.hidden, s.kda_heads * s.kda_dim, s.width * s.n_shared
    shapes = {"model.embed_tokens.weight": (s.vocab, H), "lm_head.weight": (s.vocab, H)}
    shapes |= {"model.norm.weight": (H,), "model.output_attn_res_norm.weight": (H,)}
    shapes["model.output_attn_res_proj.weight"] = (1, H)
    for layer in range(s.n_layers):
        p = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm")
        shapes |= {f"{p}{n}.weight": (H,) for n in (*norms, "mlp_res_norm")}
        shapes |= {f"{p}{n}.weight": (1, H) for n in ("self_attention_res_proj", "mlp_res_proj")}
        a = p + "self_attn."
        if s.is_kda(layer):
            for n in "qkv":
                shapes |= {f"{a}{n}_proj.weight": (D, H), f"{a}{n}_conv1d.weight": (D, 1, s.kernel)}
            shapes |= {f"{a}A_log": (s.kda_heads,), f"{a}dt_bias": (D,)}
            shapes |= {f"{a}f_a_proj.weight": (s.kda_dim, H), f"{a}f_b_proj.weight": (D, s.kda_dim)}
            shapes |= {f"{a}b_proj.weight": (s.kda_heads, H), f"{a}g_proj.weight": (D, H)}
            shapes |= {f"{a}o_norm.weight": (s.kda_dim,), f"{a}o_proj.weight": (H, D)}
        else:
            n_out, n_key = s.heads * s.value_dim, s.own_dim + s.shared_dim
            shapes |= {
                f"{a}q_a_proj.weight": (s.q_rank, H),
                f"{a}q_a_layernorm.weight": (s.q_rank,),
            }
            shapes[f"{a}q_b_proj.weight"] = (s.heads * n_key, s.q_rank)
            shapes[f"{a}kv_a_proj_with_mqa.weight"] = (s.kv_rank + s.shared_dim, H)
            shapes[f"{a}kv_a_layernorm.weight"] = (s.kv_rank,)
            shapes[f"{a}kv_b_proj.weight"] = (s.heads * (s.own_dim + s.value_dim), s.kv_rank)
            shapes |= {f"{a}g_proj.weight": (n_out, H), f"{a}o_proj.weight": (H, n_out)}
        if layer < s.n_dense:
            shapes |= _mlp_shapes(p + "mlp.", H, s.dense_width)
            continue
        m = p + "block_sparse_moe."
        shapes[f"{m}gate.weight"] = (s.n_experts, H)
        shapes[f"{m}gate.e_score_correction_bias"] = (s.n_experts,)
        shapes[f"{m}routed_expert_down_proj.weight"] = (s.latent, H)
        shapes[f"{m}routed_expert_up_proj.weight"] = (H, s.latent)
        shapes[f"{m}routed_expert_norm.weight"] = (s.latent,)
        for e in range(s.n_experts):
            shapes |= {f"{m}experts.{e}.{w}.weight": (s.width, s.latent) for w in ("w1", "w3")}
            shapes[f"{m}experts.{e}.w2.weight"] = (s.latent, s.width)
        shapes |= _mlp_shapes(m + "shared_experts.", H, F)
    return shapes


def _mlp_shapes(prefix, H, width):
    inner = {f"{prefix}{n}.weight": (width, H) for n in ("gate_proj", "up_proj")}
    return {**inner, f"{prefix}down_proj.weight": (H, width)}


def random_weights(s, seed):
    """float32 parameters whose scales make both bounds of the activation bite, the selection bias
    change the choice, and MLA's latents so small that the epsilon of their norms counts."""
    rng = np.random.default_rng(seed)
    return {n: _scaled(n, rng, shape) for n, shape in weight_shapes(s).items()}


def _scaled(name, rng, shape):
    x = rng.standard_normal(shape)
    routed = "routed" in name
    if "norm" in name:
        x = 1 + 0.3 * x
    elif name.endswith("_res_proj.weight"):
        x = x * 0.15
    elif name.endswith("A_log"):
        x = np.log(rng.uniform(1, 16, shape))
    elif name.endswith("dt_bias"):
        x = x * 0.5 - 0.5
    elif name.endswith("e_score_correction_bias"):
        x = x * 0.15
    elif name.endswith("conv1d.weight"):
        x = x * 0.5
    elif name.endswith("embed_tokens.weight"):
        x = x * 0.7
    elif name.endswith(("w1.weight", "gate_proj.weight")):
        x = x * (3.0 / shape[1] ** 0.5)
    elif name.endswith(("w3.weight", "up_proj.weight")) and not routed:
        x = x * (14.0 / shape[1] ** 0.5)
    elif name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
        x = x * (0.006 / shape[1] ** 0.5 * 3)
    elif name.endswith("q_b_proj.weight"):
        x = x * (2.0 / shape[1] ** 0.5)
    elif name.endswith(("down_proj.weight", "w2.weight")) and not routed:
        x = x * (0.3 / shape[1] ** 0.5)
    else:
        x = x * (1.0 / shape[-1] ** 0.5)
    return x.astype(np.float32)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))  # never overflows


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Reference:
    """One sequence; ``forward`` appends tokens. ``state`` has (S, window) or (latents, shared)."""

    def __init__(self, shape, weights, *, latent_eps=1e-6):
        self.s, self.latent_eps = shape, latent_eps
        self.w = {name: x.astype(np.float64) for name, x in weights.items()}
        s, D = shape, shape.kda_heads * shape.kda_dim
        self.state = [
            (np.zeros((s.kda_heads, s.kda_dim, s.kda_dim)), np.zeros((s.kernel - 1, 3 * D)))
            if s.is_kda(layer)
            else (np.zeros((0, s.kv_rank)), np.zeros((0, s.shared_dim)))
            for layer in range(s.n_layers)
        ]

    def forward(self, ids):
        """Logits [T, vocab]; ``routes`` by layer and ``hidden`` of these tokens afterwards."""
        s = self.s
        x, bank = self.w["model.embed_tokens.weight"][np.asarray(ids)], []
        self.routes, self.hidden = {}, []
        for layer in range(s.n_layers):
            p = f"model.layers.{layer}."
            h = self.mix(bank, x, p + "self_attention_res")
            starts = layer % s.block == 0
            if starts:
                bank.append(self.banked(x, h))
            u = rms(h, self.w[p + "input_layernorm.weight"], s.eps)
            a = (self.kda if s.is_kda(layer) else self.mla)(layer, u)
            x = self.joined(x, a, starts=starts)
            u = rms(
                self.mix(bank, x, p + "mlp_res"),
                self.w[p + "post_attention_layernorm.weight"],
                s.eps,
            )
            x = x + (self.mlp(p + "mlp.", u) if layer < s.n_dense else self.moe(layer, u))
            self.hidden.append(x)
        return (
            rms(self.last(bank, x), self.w["model.norm.weight"], s.eps) @ self.w["lm_head.weight"].T
        )

    # --- residuals

    def banked(self, x, _read):
        return x

    def joined(self, x, y, *, starts):
        return y if starts else x + y

    def last(self, bank, x):
        return self.mix(bank, x, "model.output_attn_res")

    def mix(self, bank, x, name):
        if not bank:
            return x
        values = np.stack([*bank, x], 1)
        keys = rms(values, 1, self.s.eps)
        shares = softmax(self.scored(keys, values) @ self.score(name))
        return np.einsum("tn,tnh->th", shares, self.mixed(keys, values))

    def score(self, name):
        return self.w[name + "_norm.weight"] * self.w[name + "_proj.weight"][0]

    def scored(self, keys, _values):
        return keys

    def mixed(self, _keys, values):
        return values

    # --- linear attention

    def kda(self, layer, x):
        s, p = self.s, f"model.layers.{layer}.self_attn."
        S, window = self.state[layer]
        n_new, heads = len(x), (len(x), s.kda_heads, s.kda_dim)
        z = np.concatenate([x @ self.w[f"{p}{n}_proj.weight"].T for n in "qkv"], 1)
        z = np.concatenate([window, z])
        taps = np.concatenate([self.w[f"{p}{n}_conv1d.weight"][:, 0] for n in "qkv"])
        y = self.convolved(z, taps, n_new)
        q, k, v = (part.reshape(heads) for part in np.split(y, 3, 1))
        q, k = self.unit(q) * s.kda_dim**-0.5, self.unit(k)
        f = x @ self.w[p + "f_a_proj.weight"].T @ self.w[p + "f_b_proj.weight"].T
        f = (f + self.w[p + "dt_bias"]).reshape(heads)
        g = self.log_decay(self.rates(self.w[p + "A_log"])[:, None], f)
        strength = sigmoid(x @ self.w[p + "b_proj.weight"].T)
        o = np.empty(heads)
        for t in range(n_new):
            S, o[t] = self.delta(S, q[t], k[t], v[t], np.exp(g[t]), strength[t])
        self.state[layer] = S, z[n_new:]
        o = self.kda_gated(rms(o, self.w[p + "o_norm.weight"], s.eps).reshape(n_new, -1), x, p)
        return o @ self.w[p + "o_proj.weight"].T

    def convolved(self, z, taps, n_new):
        y = sum(z[j : j + n_new] * taps[:, j] for j in range(self.s.kernel))
        return y * sigmoid(y)

    def unit(self, x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + UNIT_EPS)

    def rates(self, a_log):
        return np.exp(a_log)

    def log_decay(self, rates, f):
        return self.s.bound * sigmoid(rates * f)

    def delta(self, S, q, k, v, decay, strength):
        S = S * decay[:, :, None]
        error = v - np.einsum("hk,hkv->hv", k, S)
        S = S + np.einsum("hk,hv->hkv", strength[:, None] * k, error)
        return S, np.einsum("hk,hkv->hv", q, S)

    def kda_gated(self, o, x, p):
        return o * sigmoid(x @ self.w[p + "g_proj.weight"].T)

    # --- latent attention

    def mla(self, layer, x):
        s, p = self.s, f"model.layers.{layer}.self_attn."
        latents, shared = self.state[layer]
        n_new, n_past = len(x), len(latents)
        low = rms(
            x @ self.w[p + "q_a_proj.weight"].T, self.w[p + "q_a_layernorm.weight"], self.latent_eps
        )
        q = (low @ self.w[p + "q_b_proj.weight"].T).reshape(n_new, s.heads, -1)
        c = x @ self.w[p + "kv_a_proj_with_mqa.weight"].T
        new = rms(c[:, : s.kv_rank], self.w[p + "kv_a_layernorm.weight"], self.latent_eps)
        latents, shared = (
            np.concatenate([latents, new]),
            np.concatenate([shared, c[:, s.kv_rank :]]),
        )
        self.state[layer] = latents, shared
        kv_b = self.w[p + "kv_b_proj.weight"].reshape(s.heads, -1, s.kv_rank)
        keys = np.einsum("sr,hdr->hsd", latents, kv_b[:, : s.own_dim])
        values = np.einsum("sr,hvr->hsv", latents, kv_b[:, s.own_dim :])
        scores = np.einsum("thd,hsd->hts", q[..., : s.own_dim], keys)
        scores = (scores + np.einsum("thd,sd->hts", q[..., s.own_dim :], shared)) * self.key_scale()
        future = np.arange(n_past + n_new) > n_past + np.arange(n_new)[:, None]
        shares = softmax(np.where(future, -np.inf, scores))
        o = np.einsum("hts,hsv->thv", shares, values).reshape(n_new, -1)
        return self.mla_gated(o, x, p) @ self.w[p + "o_proj.weight"].T

    def key_scale(self):
        return (self.s.own_dim + self.s.shared_dim) ** -0.5

    def mla_gated(self, o, x, p):
        return o * sigmoid(x @ self.w[p + "g_proj.weight"].T)

    # --- feed-forward

    def mlp(self, prefix, x):
        gate, up, down = (self.w[f"{prefix}{n}_proj.weight"].T for n in ("gate", "up", "down"))
        return self.dense_activation(x @ gate, x @ up) @ down

    def moe(self, layer, x):
        p = f"model.layers.{layer}.block_sparse_moe."
        scores = sigmoid(self.router_logits(x, self.w[p + "gate.weight"]))
        ids, weights = self.choice(scores, self.w[p + "gate.e_score_correction_bias"])
        self.routes[layer] = ids, weights
        z, y = x @ self.w[p + "routed_expert_down_proj.weight"].T, np.zeros((len(x), self.s.latent))
        for e in range(self.s.n_experts):
            token, k = np.nonzero(ids == e)
            w1, w3, w2 = (self.w[f"{p}experts.{e}.{n}.weight"].T for n in ("w1", "w3", "w2"))
            out = self.activation(z[token] @ w1, z[token] @ w3) @ w2
            np.add.at(y, token, weights[token, k][:, None] * out)
        y = self.latent_norm(y, self.w[p + "routed_expert_norm.weight"])
        y = y @ self.w[p + "routed_expert_up_proj.weight"].T
        return y + self.mlp(p + "shared_experts.", x)

    def router_logits(self, x, gate):
        return x @ gate.T

    def choice(self, scores, bias):
        ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, : self.s.top_k]
        ids = np.sort(ids, -1)
        weights = np.take_along_axis(scores, ids, -1)
        return ids, weights / (weights.sum(-1, keepdims=True) + 1e-20) * self.s.scale

    def activation(self, g, u):
        s = self.s
        return (
            s.beta * np.tanh(g / s.beta) * sigmoid(g) * s.linear_beta * np.tanh(u / s.linear_beta)
        )

    def dense_activation(self, g, u):
        return self.activation(g, u)

    def latent_norm(self, y, weight):
        return rms(y, weight, self.s.eps)
