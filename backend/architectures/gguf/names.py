"""The tensors of a GGUF file and the Hugging Face checkpoint's that they stand for, by what they are in a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from backend.api.checkpoint.gguf import GgufHeader
from backend.architectures.description import LayerNames, ModelConfig
from backend.architectures.gguf.families import GGUF_FAMILIES, GgufFamily, gguf_architecture
from backend.architectures.gguf.held import EMBEDDING, OUTPUT
from backend.architectures.gguf.latent import stored_latent, tensors_of_latent
from backend.architectures.gguf.recurrent import Named, stored_names, tensors_of_recurrence

HEAD = "lm_head"
_QKV, _GATE_UP = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
_FUSED_QKV, _FUSED_GATE_UP = "attn_qkv", "ffn_up"


def as_stored(config: ModelConfig, header: GgufHeader) -> ModelConfig:
    """The configuration with the names of what the file holds: some projections are fused there, others not."""
    block, plain, layer = config.block, LayerNames(), config.names.layer
    changes: dict[str, Any] = dict(qkv_by_head=False, stacked=None, sinks="self_attn.sinks.weight")
    first = 0 if block.gated else 1  # without a gate there is up alone
    changes |= dict(
        expert_gate_up=plain.expert_gate_up[first:], expert_down=plain.expert_down, choice_bias="mlp.choice.bias"
    )
    changes |= dict(shared_gate_up=plain.shared_gate_up[first:], shared_down=plain.shared_down, experts=plain.experts)
    attends = next((at for at, each in enumerate(config.layers) if each.has_mixer and not each.is_recurrent), None)
    is_fused = f"blk.{attends}.{_FUSED_QKV}.weight" in header.tensors
    if is_fused != (len(layer.qkv) == 1) and attends is not None:
        changes["qkv"] = ("self_attn.qkv_proj",) if is_fused else plain.qkv
    dense = next((index for index, each in enumerate(config.layers) if not each.has_experts), None)
    if block.gated and dense is not None:
        is_fused = f"blk.{dense}.ffn_gate.weight" not in header.tensors
        if is_fused != (len(layer.gate_up) == 1):
            changes["gate_up"] = ("mlp.gate_up_proj",) if is_fused else plain.gate_up
    if config.recurrence is not None:
        changes |= stored_names(config, header)
    if config.latent is not None:
        changes |= stored_latent(header)
    return replace(config, names=replace(config.names, layer=replace(layer, **changes)))


def tensors_of(config: ModelConfig, header: GgufHeader) -> dict[str, Named]:
    """The tensors that a file with a configuration (`as_stored`) has, by their names in it."""
    family = GGUF_FAMILIES[gguf_architecture(header)]
    names, block, hidden = config.names, config.block, config.hidden_size
    found = {
        EMBEDDING.removesuffix(".weight"): Named(names.embedding, (config.vocab_size, hidden)),
        family.last_norm: Named(names.norm, (hidden,), block.norm_bias),
    }
    if not config.tied_embeddings:
        found[OUTPUT.removesuffix(".weight")] = Named(names.head, (config.vocab_size, hidden))
    for index in range(config.num_layers):
        for name, tensor in _of_layer(config, family, index):
            found[f"blk.{index}.{name}"] = tensor._replace(hf=f"{names.layers}{index}.{tensor.hf}")
    return found


def _of_layer(config: ModelConfig, family: GgufFamily, index: int) -> Iterator[tuple[str, Named]]:
    names, block, hidden = config.names.layer, config.block, config.hidden_size
    layer = config.layers[index]
    norms: list[tuple[str, str | None]] = []
    if layer.has_mixer:
        of_attention = _of_attention if config.latent is None else tensors_of_latent
        yield from (tensors_of_recurrence if layer.is_recurrent else of_attention)(config)
        norms += ("attn_norm", names.attention_norm), ("post_attention_norm", names.attention_out_norm)
    if layer.has_mlp:
        yield from (_of_experts if layer.has_experts else _of_mlp)(config)
        norms += (family.mlp_norm, names.mlp_norm), ("post_ffw_norm", names.mlp_out_norm)
    for stored, hf_norm in norms:
        if hf_norm is not None:
            yield stored, Named(hf_norm, (hidden,), block.norm_bias)


def _of_attention(config: ModelConfig) -> Iterator[tuple[str, Named]]:
    names, block, hidden, head = config.names.layer, config.block, config.hidden_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    of_file, sizes = names.qkv, (q, kv, kv) if len(names.qkv) > 1 else (q + 2 * kv,)
    if block.gates_attention:  # a head's query and its gate are one below the other, in one tensor
        of_file, sizes = (names.splits[0].stored, *names.qkv[1:3]), (2 * q, kv, kv)
    for stored, hf, size in zip(_QKV if len(of_file) > 1 else (_FUSED_QKV,), of_file, sizes, strict=True):
        yield stored, Named(hf, (size, hidden), block.qkv_bias)
    yield "attn_output", Named(names.out, (hidden, q), block.out_bias)
    if block.qk_norm != "none":
        is_row = block.qk_norm == "row"
        yield "attn_q_norm", Named(names.q_norm, (q if is_row else head,))
        yield "attn_k_norm", Named(names.k_norm, (kv if is_row else head,))
    if block.attention_sinks:
        yield "attn_sinks", Named(names.sinks.removesuffix(".weight"), (config.num_heads,))


def _of_mlp(config: ModelConfig) -> Iterator[tuple[str, Named]]:
    names, block, hidden, inter = config.names.layer, config.block, config.hidden_size, config.intermediate_size
    if len(names.gate_up) > 1:
        for stored, hf in zip(_GATE_UP, names.gate_up, strict=True):
            yield stored, Named(hf, (inter, hidden), block.mlp_bias)
    else:
        yield _FUSED_GATE_UP, Named(names.gate_up[0], (inter * (2 if block.gated else 1), hidden), block.mlp_bias)
    yield "ffn_down", Named(names.down, (hidden, inter), block.mlp_bias)


def _of_experts(config: ModelConfig) -> Iterator[tuple[str, Named]]:
    names, hidden, experts = config.names.layer, config.hidden_size, config.experts
    assert experts is not None
    inter, shared = experts.intermediate, experts.shared
    gate_up = _GATE_UP if config.block.gated else _GATE_UP[1:]
    yield "ffn_gate_inp", Named(names.router, (experts.count, hidden), experts.router_bias)
    if experts.has_choice_bias:
        shape = (1, experts.count) if experts.choice_bias_is_row else (experts.count,)
        yield "exp_probs_b", Named(names.choice_bias.removesuffix(".bias"), shape, has_bias=True, has_weight=False)
    for expert in range(experts.count):
        prefix = f"{names.experts}{expert}."
        for stored, hf in zip(gate_up, names.expert_gate_up, strict=True):
            yield f"{stored}_exps.{expert}", Named(prefix + hf, (inter, hidden), experts.has_bias)
        yield f"ffn_down_exps.{expert}", Named(prefix + names.expert_down, (hidden, inter), experts.has_bias)
    if shared:
        for stored, hf in zip(gate_up, names.shared_gate_up, strict=True):
            yield f"{stored}_shexp", Named(hf, (shared, hidden))
        yield "ffn_down_shexp", Named(names.shared_down, (hidden, shared))
    if experts.has_shared_gate:
        yield "ffn_gate_inp_shexp", Named(names.shared_gate, (1, hidden))


def norms_add_one(header: GgufHeader) -> bool:
    """True if the weights of norms are stored with the 1 that the family adds to them."""
    return GGUF_FAMILIES[gguf_architecture(header)].adds_one


def heads_in_pairs(config: ModelConfig, header: GgufHeader) -> Mapping[str, int]:
    """The projections whose rows are stored in pairs, with the number of their heads."""
    if not GGUF_FAMILIES[gguf_architecture(header)].rotates_pairs:
        return {}
    return dict(attn_q=config.num_heads, attn_k=config.num_kv_heads)
