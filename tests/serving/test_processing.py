"""Models `preprocessing` and `postprocessing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, InvalidRequest, Unsupported
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.server import ModelServer
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.processing import POSTPROCESSING, PREPROCESSING
from tests.serving.fake_triton import InferenceRequest, MetricFamily, Tensor
from tests.serving.helpers import floats, ints, strings, tokenizer_with_bos, uint64
from tests.serving.scripted import ScriptedExecutor


def answered(front: TextFront, tools: TextTools, vocab_size: int = 0, **inputs: Any) -> dict[str, np.ndarray]:
    """The arrays that answer a request. What starts with a small letter is a parameter of the model's config.pbtxt."""
    parameters = {name: value for name, value in inputs.items() if name.islower()}
    tensors = [Tensor(name, value) for name, value in inputs.items() if not name.islower()]
    batch = Batch.read(front.tensors, tensors, 64)
    info = ModelInfo("m", vocab_size or tools.tokenizer.vocab_size, 64, eos_ids=(9,))
    context = ServingContext(EngineConfig(), info, parameters=parameters)
    front.check(batch, context)
    (work,) = front.parse(batch, context, Parameters(), tools)
    assert work.request is None, "the engine has nothing to do"
    return dict(*work.output.render())


def ask(tools: TextTools, *queries: str, **inputs: Any) -> dict[str, np.ndarray]:
    lengths = ints(*range(4, 4 + len(queries)))
    return answered(PREPROCESSING, tools, **{"QUERY": strings(*queries), "REQUEST_OUTPUT_LEN": lengths, **inputs})


# ---- preprocessing ---------------------------------------------------------------------------------------------------


@pytest.mark.feature("W-02")
def test_extra_ids_stand_where_tokens_lie_beyond_the_vocabulary(tools: TextTools) -> None:
    """The vocabulary is said to end at the first token's id, so that greater ids are beyond it."""
    ids = tools.tokenizer.encode("x = 1")
    outputs = ask(tools, "x = 1", "x", vocab_size=ids[0] + 1, PROMPT_TABLE_EXTRA_ID=uint64(7, 2**63))
    extra = outputs["OUT_PROMPT_TABLE_EXTRA_IDS"]
    beyond = outputs["INPUT_ID"] > ids[0]
    assert extra.dtype == np.uint64 and beyond[0].any() and not beyond[0].all()
    assert extra.tolist() == [[7 if each else 0 for each in beyond[0]], [2**63 if each else 0 for each in beyond[1]]]


@pytest.mark.feature("W-02")
def test_every_output_has_upstreams_type_and_shape(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("x = 1")
    outputs = ask(tools, "x = 1")
    shapes = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    assert shapes == {
        "INPUT_ID": ("int32", (1, len(ids))),
        "REQUEST_INPUT_LEN": ("int32", (1, 1)),
        "DECODER_INPUT_ID": ("int32", (1, 1)),
        "REQUEST_DECODER_INPUT_LEN": ("int32", (1, 1)),
        "BAD_WORDS_IDS": ("int32", (1, 2, 0)),
        "STOP_WORDS_IDS": ("int32", (1, 2, 0)),
        "EMBEDDING_BIAS": ("float32", (1, 0)),
        "REQUEST_OUTPUT_LEN": ("int32", (1, 1)),
        "OUT_END_ID": ("int32", (1, 1)),
        "OUT_PAD_ID": ("int32", (1, 1)),
    }
    assert outputs["INPUT_ID"].tolist() == [ids] and outputs["REQUEST_INPUT_LEN"].tolist() == [[len(ids)]]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[4]]
    declared = {spec.name: spec.dtype for spec in PREPROCESSING.tensors.outputs}
    assert set(outputs) == set(declared) - {"OUT_PROMPT_TABLE_EXTRA_IDS"}


def test_rows_are_padded_on_the_right_each_with_its_own_pad_id(tools: TextTools) -> None:
    outputs = ask(tools, "def main(", "", PAD_ID=ints(7, 8), END_ID=ints(5, -1))
    ids = tools.tokenizer.encode("def main(")
    assert outputs["INPUT_ID"].tolist() == [ids, [8] * len(ids)]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(ids)], [0]]
    assert outputs["OUT_PAD_ID"].tolist() == [[7], [8]] and outputs["OUT_END_ID"].tolist() == [[5], [-1]]
    assert outputs["DECODER_INPUT_ID"].tolist() == [[7], [8]]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[4], [5]]


def test_end_and_pad_come_from_the_tokenizer_and_pad_is_the_end_id_where_there_is_none(
    tools: TextTools, tmp_path: Path
) -> None:
    outputs = ask(tools, "a")
    assert outputs["OUT_END_ID"].item() == tools.tokenizer.eos_id
    assert outputs["OUT_PAD_ID"].item() == tools.tokenizer.token_to_id(tools.tokenizer.special_tokens["pad_token"])
    bare = TextTools.from_directory(tokenizer_with_bos(tmp_path / "bare", bos_id=2))  # it names no special token
    assert bare.tokenizer.eos_id is None
    outputs = ask(bare, "a")
    assert outputs["OUT_END_ID"].item() == outputs["OUT_PAD_ID"].item() == 9, "the model's own end id"


def test_special_tokens_are_added_unless_the_config_says_no(tmp_path: Path, tools: TextTools) -> None:
    with_bos = TextTools.from_directory(tokenizer_with_bos(tmp_path / "tokenizer", bos_id=2))
    plain = tools.tokenizer.encode("x = 1")
    decoder = strings("x = 1")
    outputs = ask(with_bos, "x = 1", DECODER_QUERY=decoder)
    assert outputs["INPUT_ID"].tolist() == outputs["DECODER_INPUT_ID"].tolist() == [[2, *plain]]
    outputs = ask(with_bos, "x = 1", DECODER_QUERY=decoder, add_special_tokens="false")
    assert outputs["INPUT_ID"].tolist() == outputs["DECODER_INPUT_ID"].tolist() == [plain]
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[len(plain)]]


def test_words_get_no_special_tokens_and_a_pad_id_that_is_no_token_pads_with_0(
    tmp_path: Path, tools: TextTools
) -> None:
    with_bos = TextTools.from_directory(tokenizer_with_bos(tmp_path / "tokenizer", bos_id=2))
    outputs = ask(with_bos, "a b c", "", STOP_WORDS_DICT=strings("x", "x"), PAD_ID=ints(-1, -1))
    (word,) = tools.tokenizer.encode("x")
    assert outputs["STOP_WORDS_IDS"].tolist() == [[[word], [1]]] * 2
    assert set(outputs["INPUT_ID"][1, 1:].tolist()) == {0} and outputs["OUT_PAD_ID"].tolist() == [[-1], [-1]]


def test_word_lists_hold_ids_and_inclusive_ends(tools: TextTools) -> None:
    encode = tools.tokenizer.encode
    first, second = encode("return"), encode("; x")
    outputs = ask(
        tools, "a", "b", STOP_WORDS_DICT=strings(["return", "; x"], ["x", ""]), BAD_WORDS_DICT=strings("", "")
    )
    words = outputs["STOP_WORDS_IDS"]
    width = len(first) + len(second)
    assert words[0].tolist() == [[*first, *second], [len(first), width] + [-1] * (width - 2)]
    assert words[1].tolist() == [encode("x") + [0] * (width - 1), [1] + [-1] * (width - 1)]
    assert outputs["BAD_WORDS_IDS"].tolist() == [[[0], [-1]], [[0], [-1]]], 'what upstream makes of ""'


def test_a_bias_is_added_to_every_token_of_its_word(tools: TextTools) -> None:
    words = strings(["self", "return x"], ["", ""])
    weights = np.array([[1.5, -2.0], [0.0, 0.0]], np.float32)
    ids = {token: 1.5 for token in tools.tokenizer.encode("self")}
    for token in tools.tokenizer.encode("return x"):
        ids[token] = ids.get(token, 0.0) - 2.0
    outputs = ask(tools, "a", "b", EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    bias = outputs["EMBEDDING_BIAS"]
    assert bias.shape == (2, tools.tokenizer.vocab_size)
    assert {int(token): float(bias[0, token]) for token in np.flatnonzero(bias[0])} == ids
    assert not bias[1].any()


@pytest.mark.feature("W-04")
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"QUERY": strings("x" * 5000)}, InvalidRequest, "QUERY has 5000 bytes, the limit is 4096"),
        ({"STOP_WORDS_DICT": strings(["x"] * 129)}, InvalidRequest, "STOP_WORDS_DICT holds 129 entries"),
        ({"EMBEDDING_BIAS_WEIGHTS": floats(1.0)}, InvalidRequest, "EMBEDDING_BIAS_WORDS has 0 entries"),
        ({"QUERY": strings(b"\xff")}, InvalidRequest, "QUERY is not valid UTF-8"),
        ({"QUERY": np.empty((1, 0), dtype=object)}, InvalidRequest, "the shape is"),
        (
            {"IMAGE_BYTES": np.ones((1, 1, 1, 1, 3), np.uint8)},
            Unsupported,
            "IMAGE_BYTES asks for an image beside token ids",
        ),
        ({"IMAGES": strings("a.png")}, Unsupported, "IMAGES asks for an image beside token ids"),
    ],
)
def test_preprocessing_names_what_is_wrong(
    tools: TextTools, inputs: dict[str, np.ndarray], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(tools, "a", **inputs)


def test_a_bias_beyond_the_models_vocabulary_is_refused(tools: TextTools) -> None:
    with pytest.raises(InvalidRequest, match="the model's vocabulary has 5"):
        ask(tools, "a", EMBEDDING_BIAS_WORDS=strings("self"), EMBEDDING_BIAS_WEIGHTS=floats(1.0), vocab_size=5)


@pytest.mark.parametrize("missing", ["QUERY", "REQUEST_OUTPUT_LEN"])
def test_a_required_input_that_triton_lets_through_missing_is_named(tools: TextTools, missing: str) -> None:
    inputs = {"QUERY": strings("a"), "REQUEST_OUTPUT_LEN": ints(1), "END_ID": ints(1)}
    del inputs[missing]
    with pytest.raises(InvalidRequest, match=f"A value is required for {missing}"):
        answered(PREPROCESSING, tools, **inputs)


# ---- postprocessing --------------------------------------------------------------------------------------------------


def told(tools: TextTools, tokens: list[Any], lengths: list[Any], **inputs: Any) -> dict[str, np.ndarray]:
    arrays = {"TOKENS_BATCH": np.array(tokens, np.int32), "SEQUENCE_LENGTH": np.array(lengths, np.int32)}
    return answered(POSTPROCESSING, tools, **arrays, **inputs)


@pytest.mark.feature("W-02")
def test_texts_of_all_rows_and_beams_come_in_one_dimension(tools: TextTools) -> None:
    ids = tools.tokenizer.encode("x = 1")
    n = len(ids)
    padded = [-1] * n
    outputs = told(tools, [[ids, padded], [padded, ids]], [[n, 0], [0, n - 1]])
    expected = [b"x = 1", b"", b"", tools.tokenizer.decode(ids[:-1]).encode()]
    assert outputs["OUTPUT"].tolist() == expected and set(outputs) == {"OUTPUT"}


def test_special_tokens_are_left_out_unless_the_config_says_no(tools: TextTools) -> None:
    ids = [tools.tokenizer.eos_id, *tools.tokenizer.encode("x")]
    assert told(tools, [[ids]], [[2]])["OUTPUT"].tolist() == [b"x"]
    shown = told(tools, [[ids]], [[2]], skip_special_tokens="false")["OUTPUT"].tolist()
    assert shown == [tools.tokenizer.special_tokens["eos_token"].encode() + b"x"]


@pytest.mark.feature("W-02")
def test_what_older_clients_send_beside_the_tokens_comes_back(tools: TextTools) -> None:
    sent = {
        "CUM_LOG_PROBS": floats(-1.5),
        "OUTPUT_LOG_PROBS": np.array([[[-0.5, -1.0]]], np.float32),
        "CONTEXT_LOGITS": np.zeros((1, 2, 3), np.float32),
        "GENERATION_LOGITS": np.ones((1, 1, 2, 3), np.float32),
        "BATCH_INDEX": ints(4),
    }
    outputs = told(tools, [[[5, 6]]], [[2]], **sent)
    for name, array in sent.items():
        np.testing.assert_array_equal(outputs[f"OUT_{name}"], array)
    assert set(told(tools, [[[5, 6]]], [[2]], BATCH_INDEX=ints(4))) == {"OUTPUT", "OUT_BATCH_INDEX"}


@pytest.mark.feature("W-04")
@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[[1, 2]]], [[3]], "SEQUENCE_LENGTH holds 3, allowed is 0 to 2"),
        ([[[1, 2]]], [[-1]], "SEQUENCE_LENGTH holds -1"),
        ([[[1, -1]]], [[2]], "a token id is negative"),
        ([[[1, 2]]], [[2, 2]], r"TOKENS_BATCH has 1 rows of 1 sequences; send \[1, 1\]"),
        ([[[1] * 65]], [[1]], "sequences of 65 tokens, the limit is 64"),
        ([[[]] * 4097], [[0] * 4097], "holds 4097 sequences, the limit is 4096"),
    ],
)
def test_postprocessing_names_what_is_wrong(tools: TextTools, tokens: Any, lengths: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        told(tools, tokens, lengths)


def test_missing_lengths_are_named(tools: TextTools) -> None:
    with pytest.raises(InvalidRequest, match="A value is required for SEQUENCE_LENGTH"):
        answered(POSTPROCESSING, tools, TOKENS_BATCH=np.ones((1, 1, 1), np.int32))


# ---- in a server -----------------------------------------------------------------------------------------------------


def test_a_batch_is_one_final_response_that_neither_the_engine_nor_its_metrics_see(
    make_server: Any, executor: ScriptedExecutor, tools: TextTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricFamily, "created", [])
    server: ModelServer = make_server(
        PREPROCESSING.tensors,
        lambda batch, context, parameters: PREPROCESSING.parse(batch, context, parameters, tools),
        check_text=PREPROCESSING.check,
        decoupled=False,
    )
    request = InferenceRequest({"QUERY": strings("a", "b"), "REQUEST_OUTPUT_LEN": ints(1, 2)})
    server.execute([request])
    (response,) = request.sender.wait()
    assert response.outputs()["INPUT_ID"].shape[0] == 2 and request.sender.finals == [0]
    server._tick()
    histograms = [family for family in MetricFamily.created if family.kind == MetricFamily.HISTOGRAM]
    assert histograms and all(family.metrics[0].observed == [] for family in histograms)
    assert executor.requests == {}
