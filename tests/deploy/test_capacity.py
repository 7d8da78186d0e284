"""What is said of a model before a server starts: is it supported and whole, how large is it, how much of its KV fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api.checkpoint import quantised
from backend.api.config.file import load_config
from backend.api.config.kv_bits import KV_TYPES, named
from backend.api.config.schema import EngineConfig
from backend.architectures.checkpoint import Checkpoint, examine
from backend.architectures.hosted import sizes_of
from backend.architectures.registry import read_config
from backend.models import loader
from backend.worker.loaded_model import LoadedModel
from deploy import capacity, doctor
from deploy.capacity import described, size
from deploy.model_source import DEFAULT_MODEL
from kernels.int8_rows import GROUP
from kernels.w4a16 import GROUPS
from tests.deploy.test_cli import on_free_ports, refused
from tests.families.published import CONFIGS
from tests.model.gguf_files import write_gguf

SMALL = Checkpoint("LlamaForCausalLM", 100 << 20, 10, 4, 64, 1000, "bfloat16")


def test_an_encoder_is_said_to_keep_no_kv() -> None:
    long, short = (Checkpoint("RobertaModel", 100 << 20, 10, 4, 64, most, "float32") for most in (8192, 512))
    begin = "RobertaModel, weights 100 MiB; an encoder, which keeps no KV: texts have up to "
    assert described(long, EngineConfig()) == f"{begin}1,024 tokens"
    assert described(short, EngineConfig()) == f"{begin}512 tokens"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the default model that a test may break."""
    return Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "model"))


def with_settings(model: Path, **settings: Any) -> Path:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, **settings}))
    return model


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"architectures": ["Gemma9ForCausalLM"]},
            "Gemma9ForCausalLM is not supported; near it are Gemma",
        ),
        ({"architectures": None}, "config.json: architectures names none"),
        ({"hidden_act": "relu2"}, "hidden_act relu2 is not supported here; supported are silu, swish,"),
        (
            {"rope_parameters": {"rope_type": "xpos"}},
            "rope_type xpos is not supported here; supported are default, linear",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised (bitsandbytes), which is not supported"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 8}},
            "quantised (awq: 8 bits), which is not supported; use a float checkpoint, or",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
            "quantised (compressed-tensors: 0 config_groups), which is not supported",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many", "head_dim": []}, "vocab_size is 'many'"),
        ({"hidden_size": 4, "head_dim": None}, "num_attention_heads 8 does not divide hidden_size 4"),
    ],
)
def test_a_model_that_is_not_supported_is_told_before_anything_is_started(
    model: Path, settings: dict[str, Any], sentence: str
) -> None:
    """`refused` fails when a server process is started."""
    said = " ".join(refused("serve", *on_free_ports(), "--model", str(with_settings(model, **settings))).split())
    assert sentence in said and f"model {model}:" in said


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "model.safetensors is no safetensors file, or is cut short"), (None, "is cut short or too long")],
)
def test_a_torn_file_is_told_before_anything_is_started(model: Path, content: bytes | None, sentence: str) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] if content is None else content)
    assert sentence in " ".join(refused("serve", *on_free_ports(), "--model", str(model)).split())


@pytest.mark.parametrize(
    ("settings", "key", "number", "sentence"),
    [
        ({}, "tensor_parallel_size", 3, "which does not divide the model's 8 attention heads; use 1 or 2 or 4 or 8"),
        ({}, "pipeline_parallel_size", 99, "more than the model's"),
        ({"architectures": ["PhimoeForCausalLM"]}, "tensor_parallel_size", 2, "run by transformers, in one process"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_told_before_anything_is_started(
    model: Path, settings: dict[str, Any], key: str, number: int, sentence: str
) -> None:
    asked = ("--model", str(with_settings(model, **settings)), "--set", f"workers.{key}={number}")
    assert sentence in " ".join(refused("serve", *on_free_ports(), *asked).split())


def test_a_draft_model_is_looked_at_too(model: Path) -> None:
    with_settings(model, hidden_act="relu2")
    settings = ("--set", "speculation.mode=draft_model", "--set", f"speculation.draft_model={model}")
    said = " ".join(refused("serve", *on_free_ports(), *settings).split())
    assert f"speculation.draft_model {model}: config.json: hidden_act relu2 is not supported" in said


def test_a_model_without_a_working_doctor_row_is_a_failure(model: Path) -> None:
    assert (
        doctor.model(str(model)).state == "ok"
        and "weights 9.9 MiB, KV 6.0 KiB a token" in doctor.model(str(model)).seen
    )
    found = doctor.model(str(with_settings(model, hidden_act="relu2")))
    assert found.state == "fail" and "hidden_act relu2" in found.seen


def test_the_examination_needs_no_tensors_and_agrees_with_the_engine_on_gguf_files(tmp_path: Path) -> None:
    whole, file = examine(DEFAULT_MODEL), tmp_path / "model.gguf"
    write_gguf(DEFAULT_MODEL, file)
    read = examine(file)
    kept = ("architecture", "num_layers", "num_kv_heads", "head_dim", "max_position", "dtype")
    assert [getattr(read, name) for name in kept] == [getattr(whole, name) for name in kept]


HOSTED = "PhimoeForCausalLM"  # run by transformers
DOUBLING = "{% set a = namespace(x='ab' * 9999) %}{% for i in range(40) %}{% set a.x = a.x ~ a.x %}{% endfor %}"


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hidden_size": 10**9}, "hidden_size is 1000000000, the checkpoint's embedding has 256"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, the checkpoint's embedding has 4096"),
        ({"num_hidden_layers": 4096}, "num_hidden_layers is 4096, the checkpoint has tensors of "),
        ({"intermediate_size": 10**9}, "intermediate_size is 1000000000, no tensor of the checkpoint has so many"),
        ({"architectures": [HOSTED], "num_hidden_layers": 4096}, "num_hidden_layers is 4096, the checkpoint has"),
        ({"architectures": [HOSTED], "vocab_size": 2**31}, "vocab_size 2147483648, hidden_size 256 are more than"),
    ],
)  # fmt: skip
def test_sizes_that_the_tensors_do_not_have_are_no_model_that_is_ready(
    model: Path, changes: dict[str, object], told: str
) -> None:
    found = doctor.model(str(with_settings(model, **changes)))
    assert found.state == "fail" and told in found.seen


@pytest.mark.parametrize(
    "file, content, told",
    [
        ("tokenizer.json", "{}", "tokenizer"),
        ("chat_template.jinja", "{% for x in messages %}", "chat template"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "no"),
        ("chat_template.jinja", DOUBLING, "takes more memory than there is"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_or_a_hostile_template_is_no_model_that_is_ready(
    model: Path, file: str, content: str, told: str
) -> None:
    (model / file).unlink(missing_ok=True)
    (model / file).write_text(content)
    found = doctor.model(str(model))
    assert found.state == "fail" and told in found.seen


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL"])
def test_the_weights_of_a_gguf_file_are_told_as_memory_holds_them(tmp_path: Path, kind: str) -> None:
    """A head of blocks is the embedding, and one of floats is packed apart from it, and has an int8 copy."""
    file = write_gguf(DEFAULT_MODEL, tmp_path / "model.gguf", kind)
    config = load_config(overrides=["model.device=cpu", "model.kernels=native", f"model.path={file}"])
    loaded = LoadedModel(loader.open_directory(file), config.model, config.kv_cache, torch.device("cpu"))
    held, table = loaded.decoder.num_linear_bytes, loaded.decoder.embedding
    if isinstance(table, torch.Tensor):
        held += table.nbytes + table.numel()
    else:
        assert table is loaded.decoder.lm_head
    assert examine(file).weight_bytes == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("kv", KV_TYPES)
def test_the_kv_of_a_token_is_what_the_engine_takes_for_it(dtype: str, kv: str) -> None:
    settings = [f"model.path={DEFAULT_MODEL}", "model.device=cpu", f"model.dtype={dtype}"]
    settings += [f"kv_cache.{key}={value}" for key, value in named(kv).items() if value]
    config = load_config(overrides=settings)
    engine = LoadedModel(loader.open_directory(DEFAULT_MODEL), config.model, config.kv_cache, torch.device("cpu"))
    assert examine(DEFAULT_MODEL).kv_bytes_per_token(config, on_cpu=True) == engine.kv_bytes_per_token(32)


def test_the_line_counts_tokens_and_sequences_of_the_free_memory() -> None:
    on_cpu = load_config(overrides=["model.device=cpu"])
    a_token = 10 * 2 * 4 * 64 * 2
    assert SMALL.kv_bytes_per_token(on_cpu, on_cpu=True) == a_token
    free = (100 << 20) + 4 * 5099 * a_token
    assert described(SMALL, on_cpu, free) == (
        "LlamaForCausalLM, weights 100 MiB, KV 10.0 KiB a token; memory for about 5,000 tokens, which is 5 sequences of 1,000; "
        "up to 64 run at once"
    )
    assert "memory for about 0 tokens, which is not even one sequence of 1,000" in described(SMALL, on_cpu, 1 << 20)


def test_states_of_slots_and_snapshots_take_their_part_of_the_memory() -> None:
    model = read_config(CONFIGS["LFM2-350M"])
    hybrid = Checkpoint(model.architecture, 0, model.num_layers, 8, 64, 1000, "bfloat16", model=model)
    config = load_config(overrides=["model.device=cpu", "scheduler.max_batch_size=4"])
    a_token, state = hybrid.kv_bytes_per_token(config, on_cpu=True), model.state_bytes
    assert a_token == 6 * 2 * 8 * 64 * 2 and state == 4 * 10 * 2 * 1024
    # A sixteenth of what slots leave is for snapshots, a quarter of the rest for KV.
    free = 4 * state + 4 * 16 * 5099 * a_token // 15
    said = described(hybrid, config, free)
    assert "KV 12.0 KiB a token, a state of 80.0 KiB a sequence; memory for about 5,0" in said
    fixed = load_config(overrides=["model.device=cpu", "scheduler.max_batch_size=4", "kv_cache.snapshots=1000"])
    assert "about 5,000 tokens" in described(hybrid, fixed, 1004 * state + 4 * 5010 * a_token)


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [
        ("kv_cache.max_tokens=300", "300 tokens, which is not even one sequence of 1,000"),
        ("kv_cache.num_slots=64", "64,000 tokens, which is 64 sequences of 1,000"),
        ("model.max_seq_len=50", "about 5,000 tokens, which is 100 sequences of 50"),
        ("kv_cache.free_memory_fraction=0.5", "about 10,000 tokens, which is 10 sequences"),
    ],
)
def test_the_line_follows_the_settings_of_the_pool(setting: str, tokens: str) -> None:
    config = load_config(overrides=["model.device=cpu", setting])
    assert f"memory for {tokens}" in described(SMALL, config, (100 << 20) + 4 * 5000 * 10240)


def test_on_a_gpu_the_line_promises_no_number_that_is_not_known() -> None:
    line = described(SMALL, load_config(overrides=["model.device=cuda"]))
    assert "what is left of the GPU's memory" in line and "memory for" not in line
    assert SMALL.kv_bytes_per_token(load_config(overrides=["model.dtype=float16"]), on_cpu=False) == 10240


def test_sizes_have_few_digits_and_a_unit() -> None:
    assert [size(number) for number in (0, 999, 1000, 6144, 150 << 20, 2200 << 20)] == [
        "0 bytes", "999 bytes", "1.0 KiB", "6.0 KiB", "150 MiB", "2.1 GiB",
    ]  # fmt: skip


def test_without_a_gpu_the_engine_is_expected_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.shutil, "which", lambda name: None)
    assert capacity.on_cpu(EngineConfig())
    monkeypatch.setattr(capacity.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert not capacity.on_cpu(EngineConfig()) and capacity.on_cpu(load_config(overrides=["model.device=cpu"]))


def test_a_checkpoint_that_asks_for_quantised_kv_is_counted_so(model: Path) -> None:
    scheme = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token_head", "dynamic": True}
    section = {"quant_method": "awq", "bits": 4, "kv_cache_scheme": scheme}
    found = examine(with_settings(model, quantization_config=section))
    assert found.kv_dtype == "int8"
    assert found.kv_bytes_per_token(EngineConfig(), on_cpu=True) == 6 * 2 * 4 * (32 + 4)


def test_the_groups_that_are_allowed_are_those_of_the_kernels() -> None:
    assert quantised.LEAST_GROUP == min(GROUPS) and quantised.QOQ_GROUP == GROUP


@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}, (2, 2, 8, 1)),
        ({"num_attention_heads": 8, "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 99}, (1, 8, 16, 99)),
        ({"n_layer": 3, "n_head": 4, "n_embd": 20, "n_positions": 7}, (3, 4, 5, 7)),
        ({"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 2, "head_dim": 4}}, (2, 1, 4, 1)),
        # Of multi-head latent attention all heads have keys, with the dimensions that are rotated and those that are not.
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 16}
            | {"kv_lora_rank": 8, "qk_nope_head_dim": 24, "qk_rope_head_dim": 10},
            (1, 6, 34, 1),
        ),
        # The first positions of some encoders are not used.
        ({"architectures": ["BertModel"], "max_position_embeddings": 512, "pad_token_id": 1}, (1, 1, 1, 512)),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 514, "pad_token_id": 1}, (1, 1, 1, 512)),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 514, "pad_token_id": 3}, (1, 1, 1, 510)),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 514, "pad_token_id": None}, (1, 1, 1, 512)),
        (
            {"num_hidden_layers": -1, "num_attention_heads": 10**400, "head_dim": "x", "hidden_size": 1e308},
            (1, 1, 1, 1),
        ),
    ],
)
def test_the_sizes_of_a_hosted_model_are_those_of_its_kv(content: dict[str, object], sizes: tuple[int, ...]) -> None:
    """Layers, heads of keys and values, their dimension, positions."""
    assert sizes_of(content) == sizes
