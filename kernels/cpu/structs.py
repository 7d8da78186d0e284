"""The C structures of native/api.h, mirrored field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

from kernels.common.adapter import LINEARS, MAX_PARTS
from kernels.common.super_blocks import FORMS, Kind

# The enums NormKind of native/rows.h, Activation of native/activation.h and Format of native/formats.h.
NORMS = {"rms": 0, "layer": 1}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3, "relu2": 4}
SCORES = {"softmax": 0, "sigmoid": 1}  # the enum Scores of native/mixture.h
RECURRENCES = {"delta": 0, "sum": 1, "convolution": 2}  # the enum RecurrenceKind of native/recurrence.h
FLOAT32, BFLOAT16, FLOAT16, INT8, W8A8, W4A8, ROTATED = range(7)
SUPER_BLOCKS: dict[Kind, int] = {kind: 7 + index for index, kind in enumerate(FORMS)}
PANEL = 32


class LinearStruct(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int32),
        ("group", c_int32),
    ]


class KVLayout(Structure):
    _fields_ = [
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("key_bits", c_int32),
        ("element_bytes", c_int32),
        ("value_bits", c_int32),
    ]


class NormStruct(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class MlpStruct(Structure):
    _fields_ = [("gate_up", LinearStruct), ("down", LinearStruct)]


class RoutingStruct(Structure):
    _fields_ = [
        ("scores", c_int32),
        ("is_normalised", c_int32),
        ("groups", c_int64),
        ("kept_groups", c_int64),
        ("adds_two_best", c_int32),
        ("scale", c_float),
        ("choice_bias", c_void_p),
    ]


class MixtureStruct(Structure):
    _fields_ = [
        ("experts", POINTER(MlpStruct)),
        ("num_experts", c_int64),
        ("places", c_int64),
        ("activation", c_int32),
        ("is_gated", c_int32),
        ("shared", POINTER(MlpStruct)),
        ("router", LinearStruct),
        ("routing", RoutingStruct),
        ("is_shared_gated", c_int32),
        ("first_expert", c_int64),
    ]


class RecurrenceStruct(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("channels", c_int64),
        ("taps", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("query_at", c_int64),
        ("key_at", c_int64),
        ("value_at", c_int64),
        ("query_scale", c_float),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("inputs", LinearStruct),
        ("gates", LinearStruct),
        ("rate", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
        ("dt_min", c_float),
        ("dt_max", c_float),
        ("norm", NormStruct),
        ("norm_size", c_int64),
        ("gates_first", c_int32),
    ]


class LatentStruct(Structure):
    _fields_ = [
        ("rank", c_int64),
        ("rotated", c_int64),
        ("plain", c_int64),
        ("value_dim", c_int64),
        ("queries", LinearStruct),
        ("keys", LinearStruct),
        ("values", LinearStruct),
        ("query_norm", NormStruct),
        ("norm", NormStruct),
        ("eps", c_float),
    ]


class LayerStruct(Structure):
    _fields_ = [
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("attention_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("attention_out_norm", NormStruct),
        ("mlp_out_norm", NormStruct),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary_dim", c_int64),
        ("sinks", c_void_p),
        ("key_shift", c_void_p),
        ("window", c_int64),
        ("mixture", POINTER(MixtureStruct)),
        ("recurrence", POINTER(RecurrenceStruct)),
        ("latent", POINTER(LatentStruct)),
    ]


class FormStruct(Structure):
    _fields_ = [
        ("norm", c_int32),
        ("activation", c_int32),
        ("is_gated", c_int32),
        ("is_parallel", c_int32),
        ("norms_rows", c_int32),
        ("is_interleaved", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("query_scales", c_void_p),
        ("gates_attention", c_int32),
    ]


class ScoringStruct(Structure):
    _fields_ = [("scale", c_float), ("softcap", c_float), ("sinks", c_void_p)]


class AttentionStruct(Structure):
    _fields_ = [
        ("heads", c_int64),
        ("kv", KVLayout),
        ("scoring", ScoringStruct),
        ("window", c_int64),
        ("sink_tokens", c_int64),
    ]


class AttentionModuleStruct(Structure):
    _fields_ = [
        ("attention", AttentionStruct),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("rotary_dim", c_int64),
        ("is_interleaved", c_int32),
        ("eps", c_float),
    ]


class ScreenStruct(Structure):
    _fields_ = [("linear", LinearStruct), ("error", c_void_p), ("norm", c_void_p)]


class RanksStruct(Structure):
    _fields_ = [
        ("rank", c_int32),
        ("size", c_int32),
        ("stage", c_int32),
        ("stages", c_int32),
        ("rows", c_int64),
        ("hidden", c_int64),
        ("vocab", c_int64),
        ("first_token", c_int64),
        ("timeout_ms", c_int64),
        ("memory", c_void_p),
        ("links", c_void_p),
    ]


class ModelStruct(Structure):
    _fields_ = [
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_layers", c_int64),
        ("heads", c_int64),
        ("vocab", c_int64),
        ("max_seq_len", c_int64),
        ("sink_tokens", c_int64),
        ("widest_window", c_int64),
        ("kv", KVLayout),
        ("form", FormStruct),
        ("embedding", c_void_p),
        ("held_embedding", LinearStruct),
        ("norm", NormStruct),
        ("lm_head", LinearStruct),
        ("screen", ScreenStruct),
        ("layers", POINTER(LayerStruct)),
        ("ranks", POINTER(RanksStruct)),
    ]


class LoraPartStruct(Structure):
    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("first", c_int64),
        ("n", c_int64),
        ("rank", c_int32),
        ("scale", c_float),
    ]


class LoraLayerStruct(Structure):
    _fields_ = [(name, LoraPartStruct * MAX_PARTS) for name in LINEARS]


class BatchStruct(Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("num_blocks", c_int64),
        ("pools", POINTER(c_void_p)),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("greedy", c_void_p),
        ("adapters", POINTER(POINTER(LoraLayerStruct))),
        ("adapter_of", c_void_p),
        ("max_rank", c_int64),
        ("embedded", c_void_p),
        ("positions", c_void_p),
        ("entering", c_void_p),
        ("leaving", c_void_p),
        ("threads", c_int32),
        ("states", POINTER(c_void_p)),
        ("num_states", c_int64),
        ("state_rows", c_void_p),
        ("saves", c_void_p),
        ("num_saves", c_int64),
        ("added", c_void_p),
        ("added_layers", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("ends", c_void_p),
    ]
