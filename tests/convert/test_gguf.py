"""`./everbatch convert --to gguf`: a checkpoint, its tokenizer and its chat template in one file, and the types it may have."""

from __future__ import annotations

import ast
import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from torch import Tensor
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from backend.api.checkpoint.gguf import read_header
from backend.api.errors import ConfigError
from backend.convert.gguf.blocks import encode, fitting
from backend.convert.gguf.importance import read_imatrix
from backend.convert.gguf.types import FILE_TYPES
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.loader import load_directory
from backend.text.chat import read_templates
from backend.text.gguf_tokenizer import build_tokenizer
from backend.text.tokenizer import Tokenizer
from benchmarks.quality.perplexity import row_logits
from deploy.errors import UserError
from deploy.offline import ConvertOptions, convert_command
from tests.families.test_gguf import CASES
from tests.families.tiny import make
from tests.model.gguf_files import as_checkpoint
from tests.text.charsmaps import charsmap
from tests.text.gguf_tokenizers import write_tokens
from tests.text.test_gguf_kinds import MAP
from tests.text.test_gguf_tokenizer import MAKERS, pieces_and_scores, texts
from tests.text.tokenizers_made import TEMPLATE, wordpiece, write_directory
from tools.make_random_model import make_random_model

ROOT = Path(__file__).parents[2]
ROWS = torch.randint(1, 131, (2, 40), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
# Root mean square error relative to that of the numbers, which are normally distributed. llama.cpp's own quantiser
# (llama-cpp-python 0.3.36, no importance; of Q8_0 the same bits) has 0.0861, 0.0427, 0.0714, 0.0361 and 0.0178.
ERRORS = {"Q4_0": 0.083, "Q5_0": 0.0415, "Q5_1": 0.0375, "Q4_K": 0.0712, "Q5_K": 0.0355, "Q6_K": 0.0175, "Q8_0": 0.0056}


def log_probs(path: Path) -> Tensor:
    return row_logits(load_directory(path, None, "float32", torch.device("cpu")), ROWS).log_softmax(-1)


def to_gguf(source: Path, file: Path, **settings: Any) -> Path:
    convert_checkpoint(source, file, ConvertSettings("gguf", **settings))
    return file


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_written_so_that_it_is_read_again(tmp_path: Path, name: str) -> None:
    source = make(tmp_path / "hf", name, **CASES[name])
    file = to_gguf(source, tmp_path / "model.gguf", type="F32")
    torch.testing.assert_close(log_probs(file), log_probs(source), rtol=0, atol=1e-5)
    again = to_gguf(file, tmp_path / "again.gguf", type="F32")
    torch.testing.assert_close(log_probs(again), log_probs(file), rtol=0, atol=1e-5)


# Mean difference of the log-probabilities of a random model, which is no smooth one.
FAR = {"F32": 1e-5, "F16": 0.002, "BF16": 0.02, "Q8_0": 0.1, "Q6_K": 0.2}


@pytest.mark.parametrize("type_name", FILE_TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_type_has_the_log_probabilities_of_the_checkpoint(tmp_path: Path, family: str, type_name: str) -> None:
    source = make_random_model(tmp_path / "hf", family, seed=3, **SIZES)
    file = to_gguf(source, tmp_path / "model.gguf", type=type_name)
    header = read_header(file)
    assert header.settings["general.file_type"] == FILE_TYPES[type_name].number
    kinds = {name: place.type.name for name, place in header.tensors.items()}
    assert kinds["output_norm.weight"] == "F32" and kinds["blk.0.attn_q.weight"] == FILE_TYPES[type_name].main.name
    if "_" in type_name and type_name != "Q8_0":
        assert kinds["output.weight"] == "Q6_K"
    measured = log_probs(file)
    assert (measured - log_probs(source)).abs().mean() < FAR.get(type_name, 1.2)
    dequantised = as_checkpoint(file, source, tmp_path / "floats")
    torch.testing.assert_close(measured, log_probs(dequantised), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ERRORS)
def test_rounding_is_no_worse_than_llama_cpp_s(kind: str) -> None:
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    read = torch.from_numpy(gguf.quants.dequantize(encode(w, Type[kind]), Type[kind]))
    assert ((read - w).square().mean() / w.square().mean()).sqrt() < ERRORS[kind]


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_columns_that_count_more_are_rounded_better(kind: str) -> None:
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    importance = torch.exp(2 * torch.randn(1024, generator=torch.Generator().manual_seed(1)))
    errors = []
    for given in (None, importance):
        read = torch.from_numpy(gguf.quants.dequantize(encode(w, Type[kind], given), Type[kind]))
        errors.append(float(((read - w).square() * importance).mean()))
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("fill", [0.0, 1.0, -2.5, 1e-30, 6e4])
def test_rows_of_one_number_and_numbers_of_any_size_are_encoded(kind: str, fill: float) -> None:
    w = torch.full((2, 512), fill)
    w[1, ::2] = 0
    read = gguf.quants.dequantize(encode(w, Type[kind]), Type[kind])
    assert np.isfinite(read).all()
    np.testing.assert_allclose(read, w.numpy(), rtol=0.02, atol=1e-3 * abs(fill) + 1e-6)


def test_rows_that_are_no_whole_blocks_have_llama_cpp_s_other_type() -> None:
    assert [fitting(Type.Q4_K, columns).name for columns in (256, 96, 40)] == ["Q4_K", "Q5_0", "F16"]
    assert [fitting(kind, 96).name for kind in (Type.Q5_K, Type.Q6_K, Type.Q4_0)] == ["Q5_1", "Q8_0", "Q4_0"]


def test_weights_that_are_no_numbers_are_refused() -> None:
    for number, kind, words in (
        (float("nan"), Type.Q4_K, "no finite number"),
        (1e5, Type.F16, "the greatest of a float16"),
    ):
        with pytest.raises(ConfigError, match=words):
            encode(torch.full((1, 256), number), kind)


# ------------------------------------------------------------------------------------------------------------- tokenizers


def with_tokenizer(path: Path, backend: Backend, config: dict[str, Any]) -> Path:
    """A tiny model of Llama's with a tokenizer, and three rows of the embedding more than tokens."""
    make_random_model(path, "llama", vocab_size=backend.get_vocab_size() + 3)
    return write_directory(path, backend, config | {"chat_template": TEMPLATE})


def check_ids(source: Path, file: Path) -> dict[str, Any]:
    """Texts have the ids of the checkpoint's tokenizer. Returns the settings of the file."""
    expected, measured = Tokenizer.from_directory(source), Tokenizer.from_directory(file)
    for text in texts():
        assert measured.encode(text) == expected.encode(text), text
        assert measured.decode(expected.encode(text)) == expected.decode(expected.encode(text))
    assert (measured.bos_id, measured.eos_id) == (expected.bos_id, expected.eos_id)
    assert set(measured.eos_ids) >= set(expected.eos_ids)  # a file's <|endoftext|> ends a text as well
    assert read_templates(file) == read_templates(source)
    return dict(read_header(file).settings)


@pytest.mark.parametrize("pre", MAKERS)
def test_a_tokenizer_of_bytes_is_written_with_the_name_of_its_words(tmp_path: Path, pre: str) -> None:
    source = with_tokenizer(tmp_path / "hf", *MAKERS[pre]())
    settings = check_ids(source, to_gguf(source, tmp_path / "model.gguf"))
    alike = {"smollm": "starcoder", "smaug-bpe": "smaug-bpe"}
    assert settings["tokenizer.ggml.pre"] == alike.get(pre, pre)
    assert settings["tokenizer.ggml.tokens"][-1].startswith("[PAD") and settings["tokenizer.ggml.token_type"][-1] == 5


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_tokenizer_of_sentencepiece_is_written_with_scores(tmp_path: Path, has_prefix: bool) -> None:
    """Its merges are all pairs that are a token together, as transformers' converter makes them of SentencePiece's file."""
    backend, config, scores = pieces_and_scores()
    vocab = backend.get_vocab(with_added_tokens=True)
    normal = {text: scores[index] for text, index in vocab.items() if not text.startswith("<")}
    backend.model = models.BPE(
        vocab, theirs.generate_merges(normal | {}, normal), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    if not has_prefix:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    source = with_tokenizer(tmp_path / "hf", backend, config)
    settings = check_ids(source, to_gguf(source, tmp_path / "model.gguf"))
    assert (settings["tokenizer.ggml.model"], settings["tokenizer.ggml.add_space_prefix"]) == ("llama", has_prefix)


def test_a_unigram_tokenizer_is_written_with_its_map_of_characters(tmp_path: Path) -> None:
    pieces = dict.fromkeys(["<unk>", "</s>", "▁", "a", "b", "▁ab", "1", "/", "2", "fi"], TokenType.NORMAL)
    pieces |= {"<unk>": TokenType.UNKNOWN, "</s>": TokenType.CONTROL}
    scores = [-float(index) for index in range(len(pieces))]
    flags = dict(
        add_space_prefix=True, remove_extra_whitespaces=True, eos_token_id=1, unknown_token_id=0, add_eos_token=True
    )
    given = write_tokens(tmp_path / "t5.gguf", "t5", pieces, scores=scores, charsmap=charsmap(MAP), **flags)
    backend, config = build_tokenizer(read_header(given))
    source = with_tokenizer(tmp_path / "hf", backend, config)
    settings = check_ids(source, to_gguf(source, tmp_path / "model.gguf"))
    assert settings["tokenizer.ggml.model"] == "t5" and settings["tokenizer.ggml.add_eos_token"]
    assert bytes(settings["tokenizer.ggml.precompiled_charsmap"]) == charsmap(MAP)


def test_the_tokenizer_of_a_file_comes_into_the_next_one(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "hf", *MAKERS["llama-bpe"]())
    first = to_gguf(source, tmp_path / "model.gguf")
    second = to_gguf(first, tmp_path / "again.gguf", type="Q8_0")
    of_tokenizer = [
        {key: list(value) if isinstance(value, list) else value for key, value in read_header(file).settings.items()}
        for file in (first, second)
    ]
    assert all(of_tokenizer[0][key] == of_tokenizer[1][key] for key in of_tokenizer[0] if key.startswith("tokenizer."))


def test_words_that_have_no_name_are_refused_by_their_expression(tmp_path: Path) -> None:
    backend, config = MAKERS["gpt-2"]()
    content = json.loads(backend.to_str())
    split = dict(type="Split", pattern=dict(Regex="[aeiou]+"), behavior="Isolated", invert=False)
    content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[split, content["pre_tokenizer"]])
    source = with_tokenizer(tmp_path / "hf", Backend.from_str(json.dumps(content)), config)
    with pytest.raises(ConfigError, match=r"cuts words by \[aeiou\]\+ then .*; give --tokenizer NAME"):
        to_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
    done = convert_checkpoint(source, tmp_path / "model.gguf", ConvertSettings("gguf", tokenizer="gpt-2"))
    assert "--tokenizer gpt-2 makes other tokens than tokenizer.json" in done.remarks[0]
    assert "tokenizer.ggml.tokens" not in read_header(to_gguf(source, tmp_path / "b.gguf", tokenizer="none")).settings


def test_a_tokenizer_without_a_form_is_refused_by_its_kind(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "hf", *wordpiece())
    with pytest.raises(ConfigError, match="is of kind WordPiece, BPE and Unigram are written"):
        to_gguf(source, tmp_path / "model.gguf")


def test_a_tokenizer_of_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    backend, config = MAKERS["gpt-2"]()
    make_random_model(tmp_path / "hf", "llama")
    with pytest.raises(ConfigError, match="tokens, the embedding 131 rows"):
        to_gguf(write_directory(tmp_path / "hf", backend, config), tmp_path / "model.gguf")


# -------------------------------------------------------------------------------------------------------------- importance


def older_imatrix(path: Path, columns: int) -> Path:
    """The kind that has no magic number."""
    content = struct.pack("<i", 1)
    name = b"blk.0.attn_q.weight"
    values = np.linspace(1, 9, columns, dtype=np.float32)
    path.write_bytes(content + struct.pack("<i", len(name)) + name + struct.pack("<ii", 3, columns) + values.tobytes())
    return path


def newer_imatrix(path: Path, columns: int) -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", 4 * np.linspace(1, 9, columns, dtype=np.float32)[None])
    writer.add_tensor("blk.0.attn_q.weight.counts", np.full((1, 1), 4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("make_file", [older_imatrix, newer_imatrix])
def test_both_kinds_of_imatrix_files_are_read(tmp_path: Path, make_file: Any) -> None:
    found = read_imatrix(make_file(tmp_path / "imatrix", 256))
    assert list(found) == ["blk.0.attn_q.weight"]
    torch.testing.assert_close(found["blk.0.attn_q.weight"], torch.linspace(1, 9, 256) / 5)
    source = make_random_model(tmp_path / "hf", "llama", **SIZES)
    plain = to_gguf(source, tmp_path / "plain.gguf", type="Q4_K_M")
    other = to_gguf(source, tmp_path / "other.gguf", type="Q4_K_M", importance=str(tmp_path / "imatrix"))
    differ = [
        one.name
        for one, two in zip(gguf.GGUFReader(plain).tensors, gguf.GGUFReader(other).tensors)
        if not np.array_equal(one.data, two.data)
    ]
    assert differ == ["blk.0.attn_q.weight"]


def test_imatrix_files_that_are_none_are_refused(tmp_path: Path) -> None:
    whole = older_imatrix(tmp_path / "imatrix", 64).read_bytes()
    source = make_random_model(tmp_path / "hf", "llama", **SIZES)
    with pytest.raises(ConfigError, match=r"--importance has 64 columns for blk.0.attn_q.weight, which has 256"):
        to_gguf(source, tmp_path / "model.gguf", importance=str(tmp_path / "imatrix"))
    nan = whole[:-4] + struct.pack("<f", float("nan"))
    cases = ((b"", "cut short"), (whole[:-5], "cut short"), (b"\xff" * 40, "no imatrix"), (nan, "no mean square"))
    for content, words in (*cases, (struct.pack("<i", 0), "holds no importance")):
        (tmp_path / "imatrix").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_imatrix(tmp_path / "imatrix")
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        read_imatrix(tmp_path / "nothing")


def test_importance_is_measured_while_the_model_reads_a_text(tmp_path: Path) -> None:
    source = make_random_model(tmp_path / "hf", "llama", **SIZES)
    files = [to_gguf(source, tmp_path / f"{how}.gguf", type="Q4_K_M", importance=how) for how in ("none", "measured")]
    plain, other = ({each.name: each.data for each in gguf.GGUFReader(file).tensors} for file in files)
    differ = {name for name in plain if not np.array_equal(plain[name], other[name])}
    assert differ == {name for name in plain if name.startswith("blk.") and "norm" not in name}


# ----------------------------------------------------------------------------------------------------------------- errors


def test_what_is_not_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "llama")
    (tmp_path / "there.gguf").touch()
    cases = (
        ("there.gguf", {}, "exists already"),
        ("model.gguf", dict(type="Q9_K"), "--type is Q9_K; use one of F32"),
    )
    for name, settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            to_gguf(source, tmp_path / name, **settings)
    with pytest.raises(ConfigError, match="VaultGemmaForCausalLM is not written as GGUF"):
        to_gguf(make(tmp_path / "other", "vaultgemma"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="a GGUF file cannot say that activation is gelu"):
        to_gguf(make(tmp_path / "gelu", "llama gelu yarn"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="rope_type dynamic has no form in a GGUF file"):
        to_gguf(make(tmp_path / "dynamic", "llama dynamic"), tmp_path / "model.gguf")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["there.gguf"]


def test_the_options_are_checked_before_a_process_starts(tmp_path: Path) -> None:
    options = ConvertOptions("m", tmp_path / "a.gguf", "gguf", type="Q4_0", importance="none", tokenizer="qwen2")
    assert convert_command(options)[-6:] == ["--type", "Q4_0", "--importance", "none", "--tokenizer", "qwen2"]
    with pytest.raises(UserError, match="--type is of GGUF files; use it with --to gguf"):
        convert_command(ConvertOptions("m", tmp_path / "a", type="Q4_0"))
    with pytest.raises(UserError, match="a GGUF file is written; give a name that ends in .gguf"):
        convert_command(ConvertOptions("m", tmp_path / "a", "gguf"))
    with pytest.raises(UserError, match="--dtype is of safetensors and Meta's files; use --type"):
        convert_command(ConvertOptions("m", tmp_path / "a", "gguf", dtype="float32"))


def test_without_the_package_the_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.convert.run.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'everbatch\[gguf\]'"):
        to_gguf(make(tmp_path / "hf", "llama"), tmp_path / "model.gguf")


def test_what_writes_files_knows_nothing_of_what_reads_them() -> None:
    """So that a mistake in one of the two is found by the other."""
    for path in (ROOT / "backend/convert/gguf").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if re.match(r"backend\.(architectures|models|layers)", name)], path.name
