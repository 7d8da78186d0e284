"""Whole embedding models with an encoder, of sentence-transformers' files: from texts to vectors, with its own as the oracle."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from backend.api import EngineConfig, Request
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.embedding import EMBEDDING
from backend.serving.wires.front import TextTools
from tests.e2e.embedding_models import write_modules
from tests.e2e.oracles import result_of
from tests.e2e.test_embeddings import SENTENCE_TRANSFORMERS
from tests.hosted.encoders import hidden_states, save_encoder, tiny_encoder
from tests.model.gathering import Engine, engine_config
from tests.model.tiers import NATIVE
from tests.serving.fake_triton import Tensor

TEXTS = ["How are lines read?", "def read_lines(path):", "x", "One two THREE four five, six; seven eight: nine ten."]
SPECIAL = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
Vectors = NDArray[np.float32]


def write_tokenizer(directory: Path) -> None:
    """Word pieces as BERT has them: one letter each, with a class token in front and a separator behind."""
    signs = [chr(code) for code in range(33, 127)]
    pieces = [*SPECIAL.values(), *signs, *("##" + letter for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.enable_padding(length=128)  # as published files have it
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **SPECIAL).save_pretrained(directory)


def served_vectors(directory: Path, texts: list[str]) -> tuple[Vectors, list[list[int]]]:
    """What the model `embedding` answers, and the token ids of each text."""
    engine, tools = Engine(engine_config(directory, NATIVE)), TextTools.from_directory(str(directory))
    tensor = Tensor("text_input", np.array([[text.encode()] for text in texts], dtype=object))
    batch = Batch.read(EMBEDDING.tensors, [tensor], 64)
    context = ServingContext(EngineConfig(), engine.core.model)
    works = EMBEDDING.parse(batch, context, Parameters(9.0, ""), tools)
    requests = [work.request for work in works if isinstance(work.request, Request)]
    arrays = []
    for work, request in zip(works, requests, strict=True):
        work.output.feed(engine.answer(request.input_token_ids, request.max_tokens, request.output_config).result)
        arrays += work.output.render()
    (answer,) = arrays
    return dict(answer)["embedding"], [request.input_token_ids for request in requests]


@pytest.mark.parametrize(
    ("architecture", "pooling", "normalize"),
    [
        ("BertModel", "cls", True),
        ("BertModel", "mean", False),
        ("RobertaModel", "mean", True),
        ("ModernBertModel", None, True),
    ],
)
def test_vectors_are_the_pooled_hidden_states_of_transformers(
    architecture: str, pooling: str | None, normalize: bool, tmp_path: Path, kernels: CDLL
) -> None:
    model = tiny_encoder(architecture)
    save_encoder(model, tmp_path)
    write_tokenizer(tmp_path)
    if pooling is not None:
        write_modules(tmp_path, pooling, normalize, dimensions=64)
    found, ids = served_vectors(tmp_path, TEXTS)
    states = hidden_states(model, ids)
    pooled = torch.stack([rows[0] if pooling == "cls" else rows.mean(0) for rows in states])
    expected = torch.nn.functional.normalize(pooled) if normalize else pooled
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, kernels: CDLL) -> None:
    save_encoder(tiny_encoder("BertModel"), tmp_path)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "cls", normalize=True, dimensions=64)
    asked = {"model": str(tmp_path), "texts": TEXTS, "dimensions": 64, "normalize": True}
    expected = np.array(result_of(SENTENCE_TRANSFORMERS, "sentence_transformers", asked))
    np.testing.assert_allclose(served_vectors(tmp_path, TEXTS)[0], expected, atol=1e-5)
