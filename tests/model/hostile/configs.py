"""config.json and generation_config.json that must be refused."""

from __future__ import annotations

import os

from tests.model.hostile.base import Case, both, config, config_text, deep, instead, merged, remove, sparse, text

ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
HUGE = "1" + "0" * 400

FILES = [
    Case("config is missing", remove("config.json"), ("config.json", "File does not exist")),
    Case("config is empty", text("config.json", ""), ("config.json", "empty")),
    Case("config is a directory", instead("config.json", os.mkdir), ("config.json", "directory")),
    Case("config is a pipe", instead("config.json", os.mkfifo), ("config.json", "pipe")),
    Case("config is a device", instead("config.json", lambda path: path.symlink_to("/dev/zero")), ("config.json",)),
    Case("config leads nowhere", instead("config.json", lambda path: path.symlink_to("gone")), ("config.json", "link")),
    Case(
        "config leads to itself",
        instead("config.json", lambda path: path.symlink_to("config.json")),
        ("config.json", "link"),
    ),
    Case(
        "config leads out of the model",
        instead("config.json", lambda path: path.symlink_to("/etc/hostname")),
        ("config.json", "link"),
    ),
    Case("config is not UTF-8", text("config.json", b'{"a": "\xff\xfe"}'), ("config.json", "UTF-8", "byte 7")),
    Case("config is UTF-16", text("config.json", '{"a": 1}'.encode("utf-16")), ("config.json", "UTF-8")),
    Case("config is no JSON", text("config.json", "{'a': 1}"), ("config.json", "JSON", "line 1")),
    Case("config is cut short", text("config.json", '{"vocab_size": 3'), ("config.json", "JSON", "line 1")),
    Case("config is a list", text("config.json", "[]"), ("config.json", "list", "object")),
    Case("config is a number", text("config.json", "1e400"), ("config.json", "object")),
    Case("config is 100,000 lists deep", text("config.json", deep(100_000)), ("config.json", "nested", "32")),
    Case("config is 500 objects deep", text("config.json", deep(500, '{"a":', "}")), ("config.json", "nested", "32")),
    Case("config is a terabyte", sparse("config.json", 1 << 40), ("config.json", "1099511627776", "8388608")),
    Case("config has 5,000 digits", config_text("vocab_size", "9" * 5000), ("config.json", "digits")),
    Case(
        "generation config is deep",
        text("generation_config.json", deep(100_000)),
        ("generation_config.json", "nested", "32"),
    ),
    Case("generation config is a list", text("generation_config.json", "[1]"), ("generation_config.json", "list")),
    Case(
        "generation config is not UTF-8",
        text("generation_config.json", b'{"a": "\xe9"}'),
        ("generation_config.json", "UTF-8"),
    ),
    Case("generation config is a pipe", instead("generation_config.json", os.mkfifo), ("generation_config.json",)),
]


def _value(key: str, value: object, *tells: str) -> Case:
    return Case(f"{key} is {str(value)[:30]}", config(**{key: value}), ("config.json", key, *tells))


VALUES = [
    _value("num_hidden_layers", 10**9, "1000000000", "4096"),
    _value("num_hidden_layers", 4096, "4096", "1"),
    _value("num_hidden_layers", 0, "0", "1"),
    _value("num_hidden_layers", -1, "-1", "1"),
    _value("num_hidden_layers", True, "true", "int"),
    _value("num_hidden_layers", "1", "'1'", "int"),
    _value("num_hidden_layers", [1], "[1]", "int"),
    _value("num_hidden_layers", 1.5, "1.5", "int"),
    _value("num_hidden_layers", None, "null", "int"),
    _value("vocab_size", 0, "0", "1"),
    Case("vocab_size is 10^9", config(vocab_size=10**9), ("model.embed_tokens.weight", "config.json", "1000000000")),
    _value("vocab_size", "DELETE"),
    _value("hidden_size", 10**18, "1000000000000000000"),
    _value("hidden_size", -64, "-64", "1"),
    _value("intermediate_size", 0, "0", "1"),
    _value("num_attention_heads", 0, "0", "1"),
    _value("num_attention_heads", 3, "3", "64"),
    _value("num_attention_heads", {"a": 1}, "int"),
    _value("num_key_value_heads", 0, "0", "1"),
    _value("num_key_value_heads", -1, "-1", "1"),
    _value("head_dim", 7, "7"),
    _value("head_dim", 0, "0"),
    _value("head_dim", 10**9, "1000000000"),
    _value("max_position_embeddings", 10**12, "1000000000000", "max_seq_len"),
    _value("max_position_embeddings", 0, "0", "1"),
    _value("rms_norm_eps", "tiny", "'tiny'", "float"),
    _value("rms_norm_eps", -1.0, "-1.0"),
    _value("architectures", "LlamaForCausalLM", "'LlamaForCausalLM'", "list"),
    _value("architectures", [], "none"),
    _value("architectures", [["LlamaForCausalLM"]], "text"),
    _value("architectures", ["x" * 100_000]),
    _value("architectures", ["Evil\nForCausalLM"], "Evil"),
    _value("hidden_act", ["silu"], "silu"),
    _value("torch_dtype", 32, "32", "text"),
    _value("torch_dtype", "float8\n", "float8"),
    _value("tie_word_embeddings", "no", "'no'", "bool"),
    _value("eos_token_id", "1", "'1'", "int"),
    _value("eos_token_id", -1, "-1"),
    _value("eos_token_id", [[1]], "[1]", "int"),
    _value("rope_theta", 0, "0"),
    _value("rope_theta", "10000", "'10000'", "float"),
    _value("rope_scaling", "llama3", "llama3", "object"),
    _value("rope_scaling", [1], "[1]", "object"),
    _value("rope_scaling", {"rope_type": ["yarn"]}, "rope_type", "yarn"),
    _value("rope_scaling", ROPE, "original_max_position_embeddings"),
    Case(
        "rope_scaling of no position",
        config(rope_scaling=ROPE | {"original_max_position_embeddings": 0}),
        ("config.json", "rope_scaling.original_max_position_embeddings", "0"),
    ),
    _value("rope_scaling", {"type": "linear", "factor": 0}, "factor", "0"),
    _value("rope_scaling", {"type": "linear", "factor": "8"}, "factor", "'8'", "float"),
    Case(
        "eos ids of the generation config are text",
        merged("generation_config.json", eos_token_id="</s>"),
        ("generation_config.json", "eos_token_id", "</s>"),
    ),
    Case(
        "eos id of the generation config is beyond the vocabulary",
        merged("generation_config.json", eos_token_id=10**9),
        ("eos_token_id", "1000000000", "32"),
    ),
    Case(
        "sliding_window is text",
        config(architectures=["MistralForCausalLM"], sliding_window="4"),
        ("config.json", "sliding_window", "'4'"),
    ),
    Case(
        "layer_types is a number",
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=4, layer_types=3),
        ("config.json", "layer_types", "3"),
    ),
    Case(
        "layer_types holds lists",
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=4, layer_types=[[1]]),
        ("config.json", "layer_types", "[1]"),
    ),
    Case("hidden_size is 10^400", config_text("hidden_size", HUGE), ("config.json", "hidden_size")),
    Case("rope_theta is 10^400", config_text("rope_theta", HUGE), ("config.json", "rope_theta")),
    Case("rms_norm_eps is NaN", config_text("rms_norm_eps", "NaN"), ("config.json", "rms_norm_eps", "nan")),
    Case("rope_theta is infinite", config_text("rope_theta", "1e999"), ("config.json", "rope_theta", "inf")),
    Case("vocab_size is infinite", config_text("vocab_size", "Infinity"), ("config.json", "vocab_size", "inf")),
]


def _quantised(name: str, section: object, *tells: str) -> Case:
    return Case(f"quantised: {name}", config(quantization_config=section), ("config.json", *tells))


def _with(name: str, literal: str, method: str, **fields: object) -> Case:
    """A value of quantization_config that JSON has no word for."""
    section = ", ".join(f'"{key}": {value}' for key, value in fields.items())
    spoil = config_text("quantization_config", f'{{"quant_method": "{method}", {section}, {literal}}}')
    return Case(f"quantised: {name}", spoil, ("config.json", "group_size"))


_GROUP = dict(targets=["Linear"], weights=dict(num_bits=8, strategy="channel"))


def _compressed(**changes: object) -> dict[str, object]:
    section = dict(quant_method="compressed-tensors", format="int-quantized", config_groups={"g": _GROUP})
    return section | changes


def _weights(**changes: object) -> dict[str, object]:
    return _compressed(config_groups={"g": _GROUP | {"weights": dict(num_bits=8, strategy="group") | changes}})


QUANTISED = [
    _quantised("a list", [1], "quantization_config", "[1]"),
    _quantised("a method that is a list", dict(quant_method=["awq"]), "quant_method", "awq"),
    _quantised("awq of 3 bits", dict(quant_method="awq", bits=3), "awq", "3 bits"),
    _quantised("awq of 'four' bits", dict(quant_method="awq", bits="four"), "bits", "'four'", "int"),
    _quantised("awq without bits", dict(quant_method="awq"), "bits"),
    _quantised("awq, group 0", dict(quant_method="awq", bits=4, group_size=0), "group_size", "0"),
    _quantised("awq, group 10^9", dict(quant_method="awq", bits=4, group_size=10**9), "group_size", "1000000000"),
    _quantised("gptq, group -2", dict(quant_method="gptq", bits=4, group_size=-2), "group_size", "-2"),
    _quantised("gptq, version of lists", dict(quant_method="gptq", bits=4, checkpoint_format=[]), "checkpoint_format"),
    _quantised("gptq, dynamic text", dict(quant_method="gptq", bits=4, dynamic="all"), "dynamic", "all"),
    _with("gptq, group NaN", '"group_size": NaN', "gptq", bits=4),
    _with("awq, group infinite", '"group_size": Infinity', "awq", bits=4),
    _quantised("qoq of 2 bits", dict(quant_method="qoq", wbits=2, group_size=128), "2 bits"),
    _quantised("qoq, group text", dict(quant_method="qoq", wbits=4, group_size="128"), "group_size", "'128'"),
    _quantised("no config_groups", _compressed(config_groups="DELETE"), "config_groups"),
    _quantised("config_groups of numbers", _compressed(config_groups={"g": 1}), "config_groups.g", "1"),
    _quantised("no group at all", _compressed(config_groups={}), "0 config_groups"),
    _quantised("group of size 0", _weights(group_size=0), "group_size"),
    _quantised("group of size 10^9", _weights(group_size=10**9), "group_size", "1000000000"),
    _quantised("num_bits of text", _weights(num_bits="8"), "num_bits", "'8'"),
    _quantised("KV scheme of text", _compressed(kv_cache_scheme="int8"), "kv_cache_scheme"),
    _quantised("KV scheme of lists", _compressed(kv_cache_scheme={"num_bits": [8]}), "kv_cache_scheme"),
]

_EMPTY = both(text("config.json", " "), text("generation_config.json", ""))
CASES = [*FILES, *VALUES, *QUANTISED, Case("both files are empty", _EMPTY, ("config.json", "empty"))]
