"""Latent attention: keys and values that follow from one latent of few numbers a token (MLA of DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

from msgspec import Struct


class Latent(Struct, frozen=True):
    """Attention whose heads share a latent c and a rotated key r of each token, all that the KV cache holds. In float32:

    q         = queries(x), or queries(norm(the first query_rank rows of inputs(x))); of each head q_plain, q_rotated
    c, r      = norm(the next `rank` rows of inputs(x)), rotate(its last `rotated` rows)
    score     = (keys(q_plain) c + rotate(q_rotated) r) * attention_scale            keys, values: for each head its own rows
    y         = out(values(sum of softmax(score) * c))

    This is the absorbed form: the key of a head would be (keys^T c, r), its value values(c), as transformers computes them. The
    cache sees one KV head of ModelConfig.head_dim = rotated + rank numbers, the key (r, c) and the value (c, zeros).
    """

    rank: int
    rotated: int
    plain: int  # numbers of a head's query that are not rotated
    value_dim: int  # numbers that a head yields
    query_rank: int = 0  # 0: queries are projected at once
    norm_eps: float = 1e-6  # the latents' norms have it

    @property
    def query_dim(self) -> int:
        return self.plain + self.rotated


class LatentNames(Struct, frozen=True):
    """Names of the tensors of a layer with latent attention, as in LayerNames."""

    query: str = "self_attn.q_proj"  # where there is no query_rank
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = (
        "self_attn.kv_b_proj"  # [heads * (plain + value_dim), rank]; the next two are made of it. Empty: they are there
    )
    keys: str = "self_attn.k_b_proj"  # [heads * rank, plain]
    values: str = "self_attn.v_b_proj"  # [heads * value_dim, rank]
