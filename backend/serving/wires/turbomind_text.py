"""Models `preprocessing` and `postprocessing` beside `turbomind`: LMDeploy's client tokenises and detokenises with them.

    preprocessing    QUERY STRING [1, 1]                               ->  INPUT_ID UINT32 [1, n], REQUEST_INPUT_LEN UINT32 [1, 1]
    postprocessing   TOKENS_BATCH UINT32 [1, beams, n],
                     sequence_length UINT32 [1, beams]: how many of
                     these tokens the client has shown already         ->  OUTPUT STRING [beams]: the text of the others

The engine has no part in them. Queries `<BOS>` and `<EOS>` ask for the special token of that name; NO_TOKEN: there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest
from backend.serving.delivery.outputs import Answer, text_array
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, refused
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES
from backend.serving.work import Arrays, Work
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer

NO_TOKEN = (1 << 32) - 1  # -1 as UINT32

PREPROCESSING = ModelTensors(
    "turbomind_preprocessing",
    inputs=(
        Input("QUERY", "STRING", ANY, "request", optional=False),
        Input("REQUEST_OUTPUT_LEN", "UINT32", ANY, "request"),  # v0.0.x sends it, and wants it back
        *refused("words as text", ("BAD_WORDS_DICT", "STRING", ANY), ("STOP_WORDS_DICT", "STRING", ANY), neutral=("",)),
    ),
    outputs=(
        Output("INPUT_ID", "UINT32", ANY, "always"),
        Output("REQUEST_INPUT_LEN", "UINT32", ONE, "always"),
        Output("REQUEST_OUTPUT_LEN", "UINT32", ANY, "REQUEST_OUTPUT_LEN"),
    ),
    max_batch_size=1,
    always="unary",
)

POSTPROCESSING = ModelTensors(
    "turbomind_postprocessing",
    inputs=(
        Input("TOKENS_BATCH", "UINT32", (-1, -1), "request", optional=False),
        Input("sequence_length", "UINT32", ANY, "request", optional=False),
        Input("skip_special_tokens", "INT32", ANY, "request"),  # sent by clients of v0.5
    ),
    outputs=(Output("OUTPUT", "STRING", (-1, -1), "always"),),
    max_batch_size=1,
    always="unary",
)


def check_query(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest or Unsupported for errors that can be found without a tokenizer."""
    batch.refuse_what_is_not_built()
    most = MAX_TOKEN_BYTES * context.model.max_seq_len
    batch.check_texts("QUERY", 0, 1, most, "64 for each token of model.max_seq_len")


def preprocess(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    ids = _query_ids(required(batch, "QUERY", 0), tools.tokenizer)
    arrays: Arrays = [
        ("INPUT_ID", np.array([ids], np.uint32)),
        ("REQUEST_INPUT_LEN", np.array([[len(ids)]], np.uint32)),
    ]
    asked = batch.vector("REQUEST_OUTPUT_LEN", 0)
    if asked is not None:
        arrays.append(("REQUEST_OUTPUT_LEN", asked.reshape(1, -1)))
    return [Work(None, Answer(arrays))]


def _query_ids(query: str, tokenizer: Tokenizer) -> list[int]:
    """Never empty: clients look at the first id even of an empty query, to drop a BOS."""
    end = tokenizer.eos_id if tokenizer.eos_id is not None else next(iter(tokenizer.eos_ids), NO_TOKEN)
    if query == "<EOS>":
        return [end]
    begin = [NO_TOKEN if tokenizer.bos_id is None else tokenizer.bos_id]
    return begin if query == "<BOS>" else tokenizer.encode(query) or begin


def check_tokens(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest for more tokens than a sequence has, or an offset that belongs to no row of them."""
    tokens, offsets = _read_tokens(batch)
    if tokens.size > context.model.max_seq_len:
        raise InvalidRequest(
            f"TOKENS_BATCH holds {tokens.size} tokens, the limit is {context.model.max_seq_len} (model.max_seq_len)"
        )
    if offsets.size != len(tokens):
        raise InvalidRequest(
            f"sequence_length has {offsets.size} values and TOKENS_BATCH {len(tokens)} rows; send one for each"
        )


def postprocess(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    tokens, offsets = _read_tokens(batch)
    skip = _skips_special_tokens(batch)
    texts = [_text_after(tools.tokenizer, ids, offset, skip) for ids, offset in zip(tokens.tolist(), offsets.tolist())]
    return [Work(None, Answer([("OUTPUT", text_array(texts))]))]


def _skips_special_tokens(batch: Batch) -> bool:
    """Clients send one value for each row of tokens, all the same. Raises InvalidRequest when they differ."""
    values = batch.vector("skip_special_tokens", 0)
    if values is None or values.size == 0:
        return True
    if values.any() and not values.all():
        raise InvalidRequest("skip_special_tokens holds both 1 and 0; send several requests")
    return bool(values[0])


def _read_tokens(batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
    """TOKENS_BATCH [beams, n] and sequence_length [beams]. Raises InvalidRequest when one is absent."""
    offsets = batch.vector("sequence_length", 0)
    if offsets is None:
        raise InvalidRequest("A value is required for sequence_length")
    tokens = batch.matrix("TOKENS_BATCH", 0)
    if tokens is None:
        tokens = np.zeros((offsets.size, 0), np.uint32)
    return tokens, offsets


def _text_after(tokenizer: Tokenizer, ids: list[int], offset: int, skip_special_tokens: bool) -> str:
    """The text that the tokens from `offset` on add to that of the tokens before. A character that is not whole yet waits for the
    call that brings its end, so that the texts of all calls of a stream, one after the other, are its text.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    detokenizer.push(ids[:offset])  # tokens that the client has shown
    return detokenizer.push(ids[offset:])


TURBOMIND_PREPROCESSING = TextFront(PREPROCESSING, check_query, preprocess)
TURBOMIND_POSTPROCESSING = TextFront(POSTPROCESSING, check_tokens, postprocess)
