"""TurboMind's preprocessing and postprocessing."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from backend.api import EngineConfig, FinishReason, InvalidRequest, Result, Unsupported
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.turbomind_text import TURBOMIND_POSTPROCESSING, TURBOMIND_PREPROCESSING
from backend.text.tokenizer import Tokenizer
from tests.serving.fake_triton import Tensor
from tests.serving.helpers import MODEL_DIRECTORY, strings


def answer(front: TextFront, tools: TextTools, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    batch = Batch.read(front.tensors, [Tensor(name, array) for name, array in inputs.items()], 64)
    context = ServingContext(EngineConfig(), ModelInfo("m", tools.tokenizer.vocab_size, 64))
    front.check(batch, context)
    (work,) = front.parse(batch, context, Parameters(), tools)
    assert work.request is None, "no engine is asked"
    assert work.output.feed(Result([[]], is_final=True, finish_reasons=(FinishReason.LENGTH,))) is None
    return dict(*work.output.render())


def tokenised(tools: TextTools, query: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return answer(TURBOMIND_PREPROCESSING, tools, QUERY=strings(query), **inputs)


def text_of(tools: TextTools, ids: list[int], offset: int, **inputs: np.ndarray) -> str:
    found = answer(
        TURBOMIND_POSTPROCESSING,
        tools,
        TOKENS_BATCH=np.array([[ids]], np.uint32).reshape(1, 1, -1),
        sequence_length=np.array([[offset]], np.uint32),
        **inputs,
    )["OUTPUT"]
    assert found.shape == (1,)
    return found[0].decode()


@pytest.mark.feature("W-09")
def test_a_query_becomes_ids_and_their_number(tools: TextTools) -> None:
    found = tokenised(tools, "def main(")
    assert found["INPUT_ID"].tolist() == [tools.tokenizer.encode("def main(")]
    assert found["REQUEST_INPUT_LEN"].tolist() == [[found["INPUT_ID"].size]]
    assert {array.dtype for array in found.values()} == {np.dtype(np.uint32)}
    assert "REQUEST_OUTPUT_LEN" not in found


def test_the_oldest_clients_output_length_comes_back(tools: TextTools) -> None:
    found = tokenised(tools, "x", REQUEST_OUTPUT_LEN=np.array([[7]], np.uint32), STOP_WORDS_DICT=strings(""))
    assert found["REQUEST_OUTPUT_LEN"].tolist() == [[7]]
    with pytest.raises(Unsupported, match="STOP_WORDS_DICT asks for words as text"):
        tokenised(tools, "x", STOP_WORDS_DICT=strings("stop"))


@pytest.mark.feature("W-09")
@pytest.mark.parametrize("query", ["<BOS>", "<EOS>"])
def test_magic_queries_name_the_special_tokens(tools: TextTools, query: str) -> None:
    expected = {"<BOS>": tools.tokenizer.bos_id, "<EOS>": tools.tokenizer.eos_id}[query]
    assert tokenised(tools, query)["INPUT_ID"].tolist() == [[expected]]


def test_a_special_token_that_the_model_lacks_is_minus_one(tools: TextTools) -> None:
    text = (MODEL_DIRECTORY / "tokenizer.json").read_text()
    bare = TextTools(Tokenizer(tokenizers.Tokenizer.from_str(text)), tools.template)
    for query in ("<BOS>", "<EOS>", ""):
        assert tokenised(bare, query)["INPUT_ID"].tolist() == [[(1 << 32) - 1]]


def test_an_empty_query_has_one_id_the_bos_that_clients_drop(tools: TextTools) -> None:
    assert tokenised(tools, "")["INPUT_ID"].tolist() == [[tools.tokenizer.bos_id]]
    assert tokenised(tools, "")["REQUEST_INPUT_LEN"].tolist() == [[1]]


@pytest.mark.feature("W-09")
def test_the_offset_says_what_has_been_shown(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("def main(self): return 1")
    assert text_of(tools, ids, 0) == "def main(self): return 1"
    assert text_of(tools, ids, 2) == tools.tokenizer.decode(ids)[len(tools.tokenizer.decode(ids[:2])) :]
    assert text_of(tools, ids, len(ids)) == "" == text_of(tools, ids, len(ids) + 5) == text_of(tools, [], 0)


def test_the_pieces_of_a_stream_are_its_text_and_no_character_is_split(tools: TextTools) -> None:
    text = "naïve 🎉 ключ"
    ids = tools.tokenizer.encode(text)
    pieces = [text_of(tools, ids[: n + 1], n) for n in range(len(ids))]
    assert "".join(pieces) == text and "" in pieces and "\ufffd" not in "".join(pieces)


def test_special_tokens_are_shown_on_request(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("a<|im_end|>")
    assert text_of(tools, ids, 0) == "a" == text_of(tools, ids, 0, skip_special_tokens=np.array([[1]], np.int32))
    assert text_of(tools, ids, 0, skip_special_tokens=np.array([[0]], np.int32)) == "a<|im_end|>"
    with pytest.raises(InvalidRequest, match="both 1 and 0"):
        text_of(tools, ids, 0, skip_special_tokens=np.array([[1, 0]], np.int32))


def test_more_tokens_than_a_sequence_has_and_offsets_of_no_row_are_refused(tools: TextTools) -> None:
    with pytest.raises(InvalidRequest, match="TOKENS_BATCH holds 65 tokens, the limit is 64"):
        text_of(tools, [1] * 65, 0)
    with pytest.raises(InvalidRequest, match="sequence_length has 2 values and TOKENS_BATCH 1 rows"):
        answer(
            TURBOMIND_POSTPROCESSING,
            tools,
            TOKENS_BATCH=np.array([[[1]]], np.uint32),
            sequence_length=np.array([[0, 0]], np.uint32),
        )
    with pytest.raises(InvalidRequest, match="A value is required for sequence_length"):
        answer(TURBOMIND_POSTPROCESSING, tools, TOKENS_BATCH=np.array([[[1]]], np.uint32))
    with pytest.raises(InvalidRequest, match="QUERY has 5000 bytes, the limit is 4096"):
        tokenised(tools, "x" * 5000)
