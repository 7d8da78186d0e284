"""`./everbatch convert`: Meta's files, pickled ones and Hugging Face's, there and back, and what hostile files get."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from backend.api.errors import ConfigError
from backend.convert.meta_tokenizer import SPECIAL, read_tokenizer
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.loader import DEFAULT_MODEL
from deploy.errors import UserError
from deploy.offline import ConvertOptions, convert_command
from tests.quant.models import logits_of, random_rows
from tools.make_random_model import LLAMA3_ROPE, make_random_model

ROOT = Path(__file__).parents[2]
META = ConvertSettings(to="meta")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("hf") / "model", "llama", seed=5)


@pytest.fixture(scope="module")
def shared_meta(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("meta") / "model"
    convert_checkpoint(hf, path, META)
    return path


@pytest.fixture
def meta(shared_meta: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(shared_meta, tmp_path / "meta"))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "consolidated.00.pth", weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.feature("004-33", "004-27")
@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_there_and_back_the_tensors_are_the_same_bits_and_the_logits_equal(family: str, tmp_path: Path) -> None:
    scaled = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    more = {"rope_parameters": scaled} if family == "llama3" else {}
    source = make_random_model(tmp_path / "hf", family, seed=3, **more)
    convert_checkpoint(source, tmp_path / "meta", META)
    convert_checkpoint(tmp_path / "meta", tmp_path / "back", ConvertSettings())
    assert same(load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    rows = random_rows()
    assert torch.equal(logits_of(source, rows), logits_of(tmp_path / "back", rows))
    convert_checkpoint(tmp_path / "back", tmp_path / "again", META)
    assert same(tensors_of(tmp_path / "meta"), tensors_of(tmp_path / "again"))


def metas_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of one row, by Meta's own model.py: complex rotations of neighbouring pairs."""
    params, weights = json.loads((directory / "params.json").read_text()), tensors_of(directory)
    heads, kv_heads, head = params["n_heads"], params["n_kv_heads"], params["head_dim"]
    norm = lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * w
    frequencies = 1.0 / params["rope_theta"] ** (torch.arange(0, head, 2).float() / head)
    turns = torch.polar(torch.ones(len(ids), head // 2), torch.outer(torch.arange(len(ids)).float(), frequencies))
    rotated = lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns[:, None]).flatten(-2)
    x = weights["tok_embeddings.weight"][ids]
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for index in range(params["n_layers"]):
        w = lambda name, index=index: weights[f"layers.{index}.{name}.weight"]
        h = norm(x, w("attention_norm"))
        q = rotated((h @ w("attention.wq").T).unflatten(-1, (heads, head)))
        k = rotated((h @ w("attention.wk").T).unflatten(-1, (kv_heads, head))).repeat_interleave(heads // kv_heads, 1)
        v = (h @ w("attention.wv").T).unflatten(-1, (kv_heads, head)).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / head**0.5 + mask
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w("attention.wo").T
        h = norm(x, w("ffn_norm"))
        gate = torch.nn.functional.silu(h @ w("feed_forward.w1").T) * (h @ w("feed_forward.w3").T)
        x = x + gate @ w("feed_forward.w2").T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


@pytest.mark.feature("004-33")
def test_the_logits_are_those_of_metas_model(hf: Path, shared_meta: Path, tmp_path: Path) -> None:
    row = random_rows(shape=(1, 40))
    expected = metas_logits(shared_meta, row[0])
    convert_checkpoint(shared_meta, tmp_path / "out", ConvertSettings())
    torch.testing.assert_close(logits_of(tmp_path / "out", row)[0], expected, rtol=1e-4, atol=1e-4)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(row).logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("embedding", [0, 1], ids=["as_llama3", "as_llama2"])
def test_the_parts_of_several_ranks_are_put_together(embedding: int, hf: Path, meta: Path, tmp_path: Path) -> None:
    whole = tensors_of(meta)
    whole["rope.freqs"] = torch.ones(4)
    for rank in range(2):
        parts = {}
        for name, tensor in whole.items():
            dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            dim = embedding if name == "tok_embeddings.weight" else dim
            odd = name == "tok_embeddings.weight" or name == "output.weight"
            padded = torch.cat([tensor, tensor[:1]]) if odd else tensor  # 131 rows cannot be halved
            parts[name] = tensor if tensor.dim() == 1 else padded.chunk(2, dim)[rank].clone()
        torch.save(parts, meta / f"consolidated.{rank:02d}.pth")
    convert_checkpoint(meta, tmp_path / "out", ConvertSettings(max_positions=77))
    made, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(hf / "model.safetensors")
    assert {name: tensor[:131] for name, tensor in made.items() if "layers" not in name}.keys() < source.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in source.items() if "layers" in name)
    assert torch.equal(made["model.embed_tokens.weight"][:131], source["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 77


def test_what_params_do_not_say_is_remarked(meta: Path, tmp_path: Path) -> None:
    params = json.loads((meta / "params.json").read_text())
    del params["max_seq_len"]
    (meta / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True, "rope_theta": 500_000.0}))
    remarks = convert_checkpoint(meta, tmp_path / "out", ConvertSettings()).remarks
    assert [
        part in "".join(remarks) for part in ("131072 tokens are assumed", "8 is assumed", "no tokenizer.model")
    ] == [True] * 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == 8 and config["max_position_embeddings"] == 131_072
    convert_checkpoint(meta, tmp_path / "other", ConvertSettings(rope_factor=32.0))
    assert json.loads((tmp_path / "other" / "config.json").read_text())["rope_scaling"]["factor"] == 32


def test_pickled_weights_of_hugging_face_become_safetensors(hf: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(hf, tmp_path / "bin"))
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    files = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    for file, part in zip(files, (names[:5], names[5:])):
        torch.save({name: weights[name] for name in part}, source / file)
    index = {"weight_map": {name: files[n >= 5] for n, name in enumerate(names)}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert_checkpoint(source, tmp_path / "out", ConvertSettings(dtype="bfloat16"))
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert same(made, {name: tensor.bfloat16() for name, tensor in weights.items()})
    index["weight_map"][names[0]] = "../elsewhere.bin"
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="names other files than pytorch_model"):
        convert_checkpoint(source, tmp_path / "bad", ConvertSettings())
    assert not (tmp_path / "bad").exists()


class Runs:
    """Pickled, it would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _not_a_zip(meta: Path) -> str:
    (meta / "consolidated.00.pth").write_bytes(pickle.dumps({"a": 1}))
    return "is no archive of torch.save"


def _code(meta: Path) -> str:
    torch.save({"x": Runs(meta / "ran")}, meta / "consolidated.00.pth")
    return "code in a pickle is never run"


def _compressed(meta: Path) -> str:
    with zipfile.ZipFile(meta / "consolidated.00.pth") as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(meta / "consolidated.00.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return "is compressed, which torch.save never does"


def _expanded(meta: Path) -> str:
    tensors = tensors_of(meta)
    tensors["norm.weight"] = torch.ones(1).expand(1 << 40)
    torch.save(tensors, meta / "consolidated.00.pth")
    return "and fewer are stored"


def _list(meta: Path) -> str:
    torch.save([torch.ones(2)], meta / "consolidated.00.pth")
    return "holds a list, a dictionary of tensors is needed"


def _ints(meta: Path) -> str:
    torch.save(tensors_of(meta) | {"norm.weight": torch.ones(48, dtype=torch.int64)}, meta / "consolidated.00.pth")
    return "a plain tensor of floats is needed"


def _nested(meta: Path) -> str:
    torch.save({"model": tensors_of(meta)}, meta / "consolidated.00.pth")
    return "tensor model is a dict"


def _missing(meta: Path) -> str:
    tensors = tensors_of(meta)
    del tensors["layers.1.ffn_norm.weight"]
    torch.save(tensors, meta / "consolidated.00.pth")
    return "layers.1.post_attention_layernorm.weight has shape None"


def _shape(meta: Path) -> str:
    torch.save(tensors_of(meta) | {"norm.weight": torch.ones(47)}, meta / "consolidated.00.pth")
    return "has shape .47., params.json says .48."


def _expert(meta: Path) -> str:
    torch.save(
        tensors_of(meta) | {"layers.0.feed_forward.gate.weight": torch.ones(2, 48)}, meta / "consolidated.00.pth"
    )
    return "is no part of Llama's or Mistral's decoders"


def _param(name: str, value: Any, text: str) -> Callable[[Path], str]:
    def change(meta: Path) -> str:
        params = json.loads((meta / "params.json").read_text())
        (meta / "params.json").write_text(json.dumps(params | {name: value}))
        return text

    return change


def _link(meta: Path) -> str:
    (meta / "consolidated.00.pth").unlink()
    (meta / "consolidated.00.pth").symlink_to("/etc/passwd")
    return "is a link out of the model's directory"


def _cut_short(meta: Path) -> str:
    data = (meta / "consolidated.00.pth").read_bytes()
    (meta / "consolidated.00.pth").write_bytes(data[: len(data) // 2])
    return "is no archive of torch.save, or is cut short"


HOSTILE: dict[str, Callable[[Path], str]] = {
    "not_a_zip": _not_a_zip,
    "code": _code,
    "compressed": _compressed,
    "expanded": _expanded,
    "a_list": _list,
    "ints": _ints,
    "nested": _nested,
    "missing": _missing,
    "shape": _shape,
    "expert": _expert,
    "link": _link,
    "cut_short": _cut_short,
    "many_layers": _param("n_layers", 1 << 24, "n_layers is 16777216, and the files hold|has shape None"),
    "huge": _param("n_layers", 10**30, "n_layers"),
    "negative": _param("n_heads", -6, "n_heads is -6, 1 to"),
    "zero": _param("dim", 0, "dim is 0, 1 to"),
    "text": _param("dim", "many", "dim is 'many'"),
    "infinite": _param("norm_eps", float("inf"), "Infinity|norm_eps|eps"),
    "experts": _param("moe", {"num_experts": 8}, "moe is set, which is not converted"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_one_sentence_and_leaves_nothing(name: str, meta: Path, tmp_path: Path) -> None:
    text = HOSTILE[name](meta)
    with pytest.raises(ConfigError, match=text) as caught:
        convert_checkpoint(meta, tmp_path / "out", ConvertSettings())
    assert "\n" not in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta"] and not (meta / "ran").exists()


@pytest.fixture
def ranks() -> bytes:
    """tiktoken's ranks: the bytes, and some words."""
    tokens = [bytes([n]) for n in range(256)] + [
        b" a",
        b"ab",
        b"abc",
        " wörld".encode()[:3],
        b"hello",
        b"lo",
        b"hel",
        b"he",
    ]
    return b"".join(base64.b64encode(token) + f" {n}\n".encode() for n, token in enumerate(tokens))


def test_the_tokenizer_of_llama_3_is_read(ranks: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ranks)
    found = read_tokenizer(tmp_path)
    assert found is not None
    tokenizer, named, ends = found
    assert tokenizer.encode("hello abc").ids == [264, 260, 256, 98, 99]  # begin, hello, " a", b, c
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False).ids == [264 + SPECIAL.index("<|eot_id|>")]
    assert len(SPECIAL) == 256 and SPECIAL[9] == "<|eot_id|>" and SPECIAL[-1] == "<|reserved_special_token_246|>"
    assert named == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} and ends == [265, 272, 273]
    text = "naïve 🌍 hello\n\n12345"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def sentencepiece(pieces: list[tuple[str, float, int]]) -> bytes:
    """A ModelProto with a BPE model."""
    made = b""
    for text, score, kind in pieces:
        made += _field(
            1, _field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + bytes([3 << 3, kind])
        )
    return made + _field(2, bytes([3 << 3, 2]))


def test_the_tokenizer_of_llama_2_is_read(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{n:02X}>", 0.0, 6) for n in range(256))]
    words = ["▁a", "ab", "▁", "a", "b", "c"]
    pieces += [(word, -float(n), 1) for n, word in enumerate(words)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces))
    found = read_tokenizer(tmp_path)
    assert found is not None
    tokenizer, named, ends = found
    assert tokenizer.encode("ab c").tokens == ["<s>", "▁a", "b", "▁", "c"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["▁a", "b"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é" and ends == [2]
    assert (named["bos_token"], named["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, b"junk", b"\x0a\xff\xff\xff\xff\x0f", b"aGk= 0\naGk= 1\n", b"!! 0\n", b"aGk= 7\n", b"aGk= 0\n" * 3],
)
def test_a_hostile_tokenizer_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ConfigError, match="tokenizer.model"):
        read_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def done(shared_meta: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    output = tmp_path_factory.mktemp("cli") / "out"
    command = [sys.executable, "-m", "deploy.cli", "convert", str(shared_meta), "--output", str(output)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    yield output, ended, again


def test_the_command_shows_its_progress_and_how_to_serve(done: Any) -> None:
    output, ended, again = done
    assert ended.returncode == 0, ended.stderr
    assert "tensor 1 of 30" in ended.stdout and f"./everbatch serve --model {output}" in ended.stdout
    assert again.returncode == 2 and "is not empty; give a new one, or empty it" in again.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(to="onnx"), "--to is onnx; use one of huggingface, meta, gguf"),
        (dict(dtype="int8"), "--dtype is int8; use one of float32"),
        (dict(max_positions=-1), "--max-positions is -1; use 1 to"),
        (dict(rope_factor=float("inf")), "--rope-factor is inf; use 1 to 1024"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert_command(ConvertOptions(**dict(model="x", output=Path("y")) | change))


def test_a_model_without_a_form_in_metas_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no form with Meta's names"):
        convert_checkpoint(make_random_model(tmp_path / "qwen", "qwen3"), tmp_path / "out", META)
    with pytest.raises(ConfigError, match="original_max_position_embeddings 8192, which cannot be said otherwise"):
        convert_checkpoint(make_random_model(tmp_path / "llama3", "llama3"), tmp_path / "out", META)
    with pytest.raises(ConfigError, match="has neither params.json with consolidated files nor config.json"):
        convert_checkpoint(tmp_path, tmp_path / "out", META)
    assert not (tmp_path / "out").exists() and DEFAULT_MODEL.exists()
