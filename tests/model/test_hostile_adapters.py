"""Adapters from anywhere: whatever their files hold, reading them ends with an adapter or a sentence, in little memory."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from backend.api.checkpoint.adapter_files import check_adapter_files
from backend.api.errors import InvalidRequest, Unsupported
from backend.api.lora import LoraConfig, check_lora
from backend.api.tensor import TensorData
from backend.models import loader
from backend.models.lora import Projections, parts_of, projections_of, read_adapter
from tests.fakes.adapter_files import write_adapter

MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
MAX_RANK = 8


@pytest.fixture(scope="module")
def model() -> Projections:
    return projections_of(loader.open_directory(MODEL).config)


@pytest.fixture(scope="module")
def hidden_size(model: Projections) -> int:
    return model.layers[0]["q_proj"].k


@pytest.fixture
def adapter(hidden_size: int, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", size=hidden_size)


def write_rows(directory: Path, config: np.ndarray, weights: np.ndarray) -> Path:
    directory.mkdir()
    np.save(directory / "model.lora_config.npy", config)
    np.save(directory / "model.lora_weights.npy", weights)
    return directory


@pytest.fixture
def rows(hidden_size: int, tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows", np.array([[1, 0, 4]], np.int32), np.ones((1, 8 * hidden_size), np.float32))


def refusal(path: Path, model: Projections, dtype: torch.dtype = torch.float32) -> str:
    """What is told of an adapter, which takes less than 64 MiB to find out."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            read_adapter(LoraConfig(1, path=str(path)), model, dtype, MAX_RANK)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


def test_the_adapters_that_are_changed_here_can_be_read(model: Projections, adapter: Path, rows: Path) -> None:
    for path in (adapter, rows):
        (part,) = parts_of(read_adapter(LoraConfig(1, path=str(path)), model, torch.float32, MAX_RANK))
        assert part.rank == 4


@pytest.mark.parametrize("alpha", ["1" + 400 * "0", "-1" + 400 * "0", "1e400", "NaN", "1e10", "true", '"8"', "[8]"])
@pytest.mark.parametrize("key", ["lora_alpha", "alpha_pattern"])
def test_an_alpha_that_is_no_number_in_reason_is_named(model: Projections, adapter: Path, key: str, alpha: str) -> None:
    value = f'{{"q_proj": {alpha}}}' if key == "alpha_pattern" else alpha
    (adapter / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "{key}": {value}}}')
    assert "adapter_config.json: lora_alpha is " in (told := refusal(adapter, model)) and len(told) < 300
    assert told.endswith("a number up to 1e+09 is needed")


def test_a_factor_that_makes_weights_infinite_is_refused(model: Projections, adapter: Path) -> None:
    """Of 1e9 / 4 float16 holds no product, though it holds all numbers of the file."""
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1e9}')
    assert "not finite in torch.float16" in refusal(adapter, model, torch.float16)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.ones((1, 3), np.int32))
    return file.getvalue()


def header(text: str, rest: bytes = b"") -> bytes:
    """A .npy file with this header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1") + rest


FOREIGN = {
    "an .npz": npz(),
    "nothing": b"",
    "another format": b"\x89PNG",
    "a pickle": header("{'descr': '|O', 'fortran_order': False, 'shape': (1, 3), }", b"\x80\x04."),
    "12 TiB": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3298534883328), }", bytes(12)),
    "fewer than it says": header("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 3), }", bytes(11)),
    "more than it says": header("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 3), }", bytes(13)),
    "a negative size": header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1, -3), }", bytes(12)),
    "a size beyond all": header(
        "{'descr': '<i4', 'fortran_order': False, 'shape': (9" + "0" * 4000 + ",), }", bytes(12)
    ),
    "texts": header("{'descr': '<U4', 'fortran_order': False, 'shape': (1,), }", bytes(16)),
    "records": header("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,), }", bytes(4)),
    "no dictionary": header("[1, 2"),
    "a deep header": header("(" * 3000 + ")" * 3000),
    "no such type": header("{'descr': '<q77', 'fortran_order': False, 'shape': (1, 3), }", bytes(12)),
    "a version to come": b"\x93NUMPY\x09\x00" + bytes(100),
    "no dimension": header("{'descr': '<i4', 'fortran_order': False, 'shape': (), }", bytes(4)),
    "three dimensions": header("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1, 3), }", bytes(24)),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("name", ["model.lora_config.npy", "model.lora_weights.npy"])
def test_arrays_that_hold_something_else_are_named(model: Projections, rows: Path, name: str, what: str) -> None:
    (rows / name).write_bytes(FOREIGN[what])
    told = refusal(rows, model)
    assert "lora_" in told and len(told) < 400 and "Traceback" not in told and "/" not in told.replace("1e+", "")


def test_a_file_of_twelve_tebibytes_is_not_read(model: Projections, rows: Path) -> None:
    """It takes no room on the disk, and its header is true."""
    path = rows / "model.lora_weights.npy"
    path.write_bytes(header("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3298534883328), }"))
    try:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (12 << 40))
    except OSError:
        pytest.skip("this file system has no files of 12 TiB")
    assert "model.lora_weights.npy has 1319" in refusal(rows, model) and "at most 8589934592 are read" in refusal(
        rows, model
    )


def test_rows_in_the_order_of_fortran_are_the_same_rows(model: Projections, hidden_size: int, rows: Path) -> None:
    weights = np.random.default_rng(0).random((1, 8 * hidden_size), np.float32)
    found = []
    for array in (weights, np.asfortranarray(weights.T).T, np.asfortranarray(np.repeat(weights, 1, 0))):
        np.save(rows / "model.lora_weights.npy", array)
        (part,) = parts_of(read_adapter(LoraConfig(1, path=str(rows)), model, torch.float32, MAX_RANK))
        found.append(torch.cat([part.a.flatten(), part.b.flatten()]))
    assert all(torch.equal(each, torch.from_numpy(weights[0])) for each in found)


def test_two_rows_in_the_order_of_fortran_are_not_exchanged(model: Projections, hidden_size: int, rows: Path) -> None:
    weights = np.random.default_rng(0).random((2, 8 * hidden_size), np.float32)
    np.save(rows / "model.lora_config.npy", np.array([[1, 0, 4], [1, 1, 4]], np.int32))
    np.save(rows / "model.lora_weights.npy", np.asfortranarray(weights))
    first, second = parts_of(read_adapter(LoraConfig(1, path=str(rows)), model, torch.float32, MAX_RANK))
    for part, row in ((first, weights[0]), (second, weights[1])):
        assert torch.equal(torch.cat([part.a.flatten(), part.b.flatten()]), torch.from_numpy(row))


@pytest.mark.parametrize(
    "config", [[[1, 0, 0]], [[1, 99, 4]], [[1, 0, 2**30]], [[2**31 - 1, 0, 4]], [[-1, 0, 4]], [[1]], [[]]]
)
def test_numbers_of_rows_out_of_their_range_end_with_a_sentence(
    model: Projections, rows: Path, config: list[list[int]]
) -> None:
    np.save(rows / "model.lora_config.npy", np.array(config, np.int64))
    if config == [[1, 0, 0]]:  # a row of nothing
        assert not [*parts_of(read_adapter(LoraConfig(1, path=str(rows)), model, torch.float32, MAX_RANK))]
    else:
        assert refusal(rows, model).startswith("LoRA adapter 1: ")


def test_weights_without_numbers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"lora_weights have shape \[1, 0\]"):
        check_lora(LoraConfig(1, TensorData("float32", (1, 0), b""), ((1, 0, 0),)), is_enabled=True)


def _renamed(adapter: Path, change: Callable[[str], str]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("old", "new"), [("layers.0", "layers." + "9" * 5000), ("layers.0", "layers.\u0663"), ("layers.0", "layers.-1")]
)
def test_a_layer_that_is_no_number_is_no_layer(model: Projections, adapter: Path, old: str, new: str) -> None:
    _renamed(adapter, lambda name: name.replace(old, new))
    assert "is no LoRA of a decoder layer's projection" in refusal(adapter, model)


@pytest.mark.parametrize(
    "module",
    ["self_attn." + "x" * 100_000, "mlp.\n\x1b[2J", "self_attn.q_proj.0", "0.0.0", "\u0663", "self_attn..q_proj"],
)
@pytest.mark.parametrize("rank", [4, MAX_RANK + 1])
def test_a_module_that_there_is_not_is_one_short_sentence(
    model: Projections, hidden_size: int, tmp_path: Path, module: str, rank: int
) -> None:
    adapter = write_adapter(tmp_path / "adapter", rank=rank, size=hidden_size)
    _renamed(adapter, lambda name: name.replace("self_attn.q_proj", module))
    told = refusal(adapter, model)
    assert "which LlamaForCausalLM does not have, or takes no adapters for; in layer 0 it takes them for q" in told
    assert len(told) < 500 and told.isprintable()
    with pytest.raises(InvalidRequest) if rank > MAX_RANK else nullcontext() as caught:
        check_adapter_files(adapter, MAX_RANK)
    assert rank <= MAX_RANK or len(str(caught.value)) < 500


def test_two_names_of_one_tensor_are_refused(model: Projections, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"other.{name}": 2 * tensor for name, tensor in tensors.items()}, path)
    assert "are the same; leave one out" in refusal(adapter, model)


def test_a_rank_above_the_limit_is_refused_by_its_header(model: Projections, hidden_size: int, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "high", rank=MAX_RANK + 1, size=hidden_size)
    assert "it has rank 9 in layer 0, q_proj, the limit is 8 (lora.max_rank)" in refusal(adapter, model)


def test_an_error_keeps_its_class(model: Projections, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "head", module="lm_head")
    with pytest.raises(Unsupported, match="tensor base_model.model.lm_head.lora_A.weight is no LoRA"):
        read_adapter(LoraConfig(1, path=str(adapter)), model, torch.float32, MAX_RANK)
