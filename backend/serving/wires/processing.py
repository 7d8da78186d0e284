"""Models `preprocessing` and `postprocessing` of the TensorRT-LLM wire: text to token ids, and token ids to text.

Clients that drive `tensorrt_llm` themselves send its inputs and outputs through these two. Neither has work for the engine:
one Work without a request answers all rows of a batch together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest
from backend.serving.delivery.outputs import Answer, text_array
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, refused
from backend.serving.upstream_parameters import is_true
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES
from backend.serving.wires.trtllm_text import read_bias
from backend.serving.wires.word_lists import encode_word_lists
from backend.serving.work import Arrays, Work
from backend.text.tokenizer import Tokenizer

MAX_SEQUENCES = 4096  # rows times beams of one request to postprocessing
_IMAGES = (
    "an image beside token ids (the models ensemble and tensorrt_llm_bls take image_url_input and image_bytes_input)"
)

PREPROCESSING_TENSORS = ModelTensors(
    "preprocessing",
    inputs=(
        Input("QUERY", "STRING", ONE, "request", optional=False),
        Input("DECODER_QUERY", "STRING", ONE, "request"),
        Input("REQUEST_OUTPUT_LEN", "INT32", ONE, "request", optional=False),
        Input("BAD_WORDS_DICT", "STRING", ANY, "request"),
        Input("STOP_WORDS_DICT", "STRING", ANY, "request"),
        Input("EMBEDDING_BIAS_WORDS", "STRING", ANY, "request"),
        Input("EMBEDDING_BIAS_WEIGHTS", "FP32", ANY, "request"),
        Input("END_ID", "INT32", ONE, "request"),
        Input("PAD_ID", "INT32", ONE, "request"),
        Input("PROMPT_TABLE_EXTRA_ID", "UINT64", ONE, "request"),
        *refused(_IMAGES, ("IMAGE_BYTES", "UINT8", (-1, -1, -1, -1))),
        *refused("a video", ("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1))),
        *refused(_IMAGES, ("IMAGE_URL", "STRING", ONE), ("IMAGES", "STRING", ANY), neutral=("",)),
    ),
    outputs=(
        Output("INPUT_ID", "INT32", ANY, "always: padded on the right with the pad id"),
        Output("REQUEST_INPUT_LEN", "INT32", ONE, "always"),
        Output("DECODER_INPUT_ID", "INT32", ANY, "always: DECODER_QUERY, or else one pad id"),
        Output("REQUEST_DECODER_INPUT_LEN", "INT32", ONE, "always"),
        Output("BAD_WORDS_IDS", "INT32", (2, -1), "always: empty without BAD_WORDS_DICT"),
        Output("STOP_WORDS_IDS", "INT32", (2, -1), "always: empty without STOP_WORDS_DICT"),
        Output("EMBEDDING_BIAS", "FP32", ANY, "always: empty without EMBEDDING_BIAS_WORDS"),
        Output("REQUEST_OUTPUT_LEN", "INT32", ANY, "always"),
        Output("OUT_END_ID", "INT32", ONE, "always: END_ID, or else the tokenizer's"),
        Output("OUT_PAD_ID", "INT32", ONE, "always: PAD_ID, or else the tokenizer's"),
        Output("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", ANY, "PROMPT_TABLE_EXTRA_ID"),
    ),
    always="unary",
)

_ECHOED = (  # until v0.6, until v0.12: what postprocessing gives back as OUT_ and the name
    ("CUM_LOG_PROBS", "FP32", ANY),
    ("OUTPUT_LOG_PROBS", "FP32", (-1, -1)),
    ("CONTEXT_LOGITS", "FP32", (-1, -1)),
    ("GENERATION_LOGITS", "FP32", (-1, -1, -1)),
    ("BATCH_INDEX", "INT32", ONE),
)

POSTPROCESSING_TENSORS = ModelTensors(
    "postprocessing",
    inputs=(
        Input("TOKENS_BATCH", "INT32", (-1, -1), "request", optional=False),
        Input("SEQUENCE_LENGTH", "INT32", ANY, "request", optional=False),
        *(Input(name, dtype, dims, "request") for name, dtype, dims in _ECHOED),
    ),
    outputs=(
        Output("OUTPUT", "STRING", ANY, "always: one text for each row and beam, without a batch dimension"),
        *(Output(f"OUT_{name}", dtype, dims, name) for name, dtype, dims in _ECHOED),
    ),
    always="unary",
)


# ---- preprocessing ---------------------------------------------------------------------------------------------------


def check_preprocessing(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest or Unsupported for all that can be found without decoding text."""
    batch.refuse_what_is_not_built()
    limits = context.config.limits
    prompt_bytes = MAX_TOKEN_BYTES * context.model.max_seq_len
    for row in range(batch.num_rows):
        for name in ("QUERY", "DECODER_QUERY"):
            batch.check_texts(name, row, 1, prompt_bytes, "64 for each token of model.max_seq_len")
        for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT"):
            batch.check_texts(name, row, limits.max_words, limits.max_word_bytes, "limits.max_word_bytes")
        batch.check_texts(
            "EMBEDDING_BIAS_WORDS", row, limits.max_logit_bias, limits.max_bias_bytes, "limits.max_bias_bytes"
        )


def parse_preprocessing(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    """One Work for the whole batch. Raises InvalidRequest."""
    tokenizer, rows = tools.tokenizer, range(batch.num_rows)
    special = is_true(context.parameters.get("add_special_tokens", "true"))
    end_ids, pad_ids = _end_and_pad_ids(batch, context, tokenizer)
    prompts = [tokenizer.encode(required(batch, "QUERY", row), special) for row in rows]
    if batch.has("DECODER_QUERY"):
        decoder = [tokenizer.encode(required(batch, "DECODER_QUERY", row), special) for row in rows]
    else:
        decoder = [[pad_id] for pad_id in pad_ids]
    output_lens = [required(batch, "REQUEST_OUTPUT_LEN", row) for row in rows]
    arrays: Arrays = [
        ("INPUT_ID", _padded(prompts, pad_ids)),
        ("REQUEST_INPUT_LEN", _column([len(ids) for ids in prompts])),
        ("DECODER_INPUT_ID", _padded(decoder, pad_ids)),
        ("REQUEST_DECODER_INPUT_LEN", _column([len(ids) for ids in decoder])),
        ("BAD_WORDS_IDS", _word_ids(batch, "BAD_WORDS_DICT", tokenizer)),
        ("STOP_WORDS_IDS", _word_ids(batch, "STOP_WORDS_DICT", tokenizer)),
        ("EMBEDDING_BIAS", _dense_bias(batch, context, tokenizer)),
        ("REQUEST_OUTPUT_LEN", _column(output_lens)),
        ("OUT_END_ID", _column(end_ids)),
        ("OUT_PAD_ID", _column(pad_ids)),
    ]
    if batch.has("PROMPT_TABLE_EXTRA_ID"):
        extra_ids = np.array([[required(batch, "PROMPT_TABLE_EXTRA_ID", row)] for row in rows], np.uint64)
        is_virtual = _padded(prompts, pad_ids) >= context.model.vocab_size
        arrays.append(("OUT_PROMPT_TABLE_EXTRA_IDS", np.where(is_virtual, extra_ids, np.uint64(0))))
    return [Work(None, Answer(arrays))]


def _end_and_pad_ids(batch: Batch, context: ServingContext, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """End and pad id of each row: the request's, else the tokenizer's, which pads with its end id if it has no pad token."""
    known_ends = [end for end in (tokenizer.eos_id, *tokenizer.eos_ids, *context.model.eos_ids) if end is not None]
    end_id = known_ends[0] if known_ends else -1
    named = tokenizer.token_to_id(tokenizer.special_tokens.get("pad_token", ""))
    pad_id = end_id if named is None else named
    rows = range(batch.num_rows)
    given_ends, given_pads = ([batch.scalar(name, row) for row in rows] for name in ("END_ID", "PAD_ID"))
    return (
        [end_id if given is None else given for given in given_ends],
        [pad_id if given is None else given for given in given_pads],
    )


def _padded(rows: list[list[int]], pad_ids: list[int]) -> NDArray[np.int32]:
    """INT32 [rows, width of the longest], each row padded on the right; a pad id of -1, which is no token, as 0."""
    array = np.empty((len(rows), max(map(len, rows))), np.int32)
    for n, (ids, pad_id) in enumerate(zip(rows, pad_ids)):
        array[n] = max(0, pad_id)
        array[n, : len(ids)] = ids
    return array


def _column(values: list[int]) -> NDArray[np.int32]:
    """INT32 [rows, 1]."""
    return np.array(values, np.int32).reshape(-1, 1)


def _word_ids(batch: Batch, name: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """INT32 [rows, 2, L]; L = 0 without the input. Each word is encoded as it is written, as TensorRT-LLM does."""
    if not batch.has(name):
        return np.empty((batch.num_rows, 2, 0), np.int32)
    rows = [[word for word in batch.texts(name, row) if word] for row in range(batch.num_rows)]
    return encode_word_lists([[tokenizer.encode(word, add_special_tokens=False) for word in words] for words in rows])


def _dense_bias(batch: Batch, context: ServingContext, tokenizer: Tokenizer) -> NDArray[np.float32]:
    """FP32 [rows, vocabulary], as `tensorrt_llm` takes it; [rows, 0] where no row has a bias. Raises InvalidRequest."""
    rows = [
        read_bias(batch, row, tokenizer, "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
        for row in range(batch.num_rows)
    ]
    vocab_size = context.model.vocab_size
    array = np.zeros((batch.num_rows, vocab_size if any(rows) else 0), np.float32)
    for n, bias in enumerate(rows):
        for token_id, weight in bias.items():
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"a word of EMBEDDING_BIAS_WORDS holds token {token_id}, the model's vocabulary has {vocab_size}; "
                    "leave it out"
                )
            array[n, token_id] = weight
    return array


# ---- postprocessing --------------------------------------------------------------------------------------------------


def check_postprocessing(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest for inputs whose shapes do not fit each other, or more tokens than any sequence has."""
    tokens, lengths = batch.array("TOKENS_BATCH"), batch.array("SEQUENCE_LENGTH")
    if tokens is None or lengths is None:
        raise InvalidRequest(f"A value is required for {'TOKENS_BATCH' if tokens is None else 'SEQUENCE_LENGTH'}")
    num_rows, beams, width = tokens.shape
    if lengths.shape != (num_rows, beams):
        raise InvalidRequest(
            f"Invalid format for SEQUENCE_LENGTH: the shape is {list(lengths.shape)}, TOKENS_BATCH has {num_rows} rows of "
            f"{beams} sequences; send [{num_rows}, {beams}]"
        )
    if num_rows * beams > MAX_SEQUENCES:
        raise InvalidRequest(f"TOKENS_BATCH holds {num_rows * beams} sequences, the limit is {MAX_SEQUENCES}; split it")
    if width > context.model.max_seq_len:
        raise InvalidRequest(
            f"TOKENS_BATCH holds sequences of {width} tokens, the limit is {context.model.max_seq_len} "
            "(model.max_seq_len); send fewer"
        )


def parse_postprocessing(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    """One Work for the whole batch. Raises InvalidRequest for a length or an id out of range."""
    skip = is_true(context.parameters.get("skip_special_tokens", "true"))
    texts = [tools.tokenizer.decode(ids, skip_special_tokens=skip) for ids in _sequences(batch)]
    arrays: Arrays = [("OUTPUT", text_array(texts))]
    for name, _, _ in _ECHOED:
        if (echoed := batch.array(name)) is not None:
            arrays.append((f"OUT_{name}", echoed))
    return [Work(None, Answer(arrays))]


def _sequences(batch: Batch) -> list[list[int]]:
    """The token ids of every beam of every row, without their padding."""
    tokens, lengths = batch.array("TOKENS_BATCH"), batch.array("SEQUENCE_LENGTH")
    assert tokens is not None and lengths is not None, "they have been checked"
    width = tokens.shape[2]
    wrong = lengths[(lengths < 0) | (lengths > width)]
    if wrong.size:
        raise InvalidRequest(f"SEQUENCE_LENGTH holds {wrong[0]}, allowed is 0 to {width}, the width of TOKENS_BATCH")
    flat = tokens.reshape(tokens.shape[0] * tokens.shape[1], width)
    return [row[:length].tolist() for row, length in zip(flat, lengths.reshape(-1))]


PREPROCESSING = TextFront(PREPROCESSING_TENSORS, check_preprocessing, parse_preprocessing)
POSTPROCESSING = TextFront(POSTPROCESSING_TENSORS, check_postprocessing, parse_postprocessing)
