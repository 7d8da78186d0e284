"""Model `lmdeploy_model`: the wire of LMDeploy's Triton Python backend (v0.4.0 to v0.9.2). Text in, text out, no chat template.

A stream's responses hold the new text, the only response of a request that does not stream all of it, and never the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from backend.api import InvalidRequest, OutputConfig, Request, SamplingConfig
from backend.serving.delivery.outputs import SeparateOutput, text_array
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.dialect import Dialect, prefixed
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, sampling_inputs
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES, prompt_ids
from backend.serving.work import Arrays, Work
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from backend.text.words import words_token_ids

TENSORS = ModelTensors(
    "lmdeploy",
    inputs=(
        Input("prompt", "STRING", ANY, "request", optional=False),
        Input("max_tokens", "INT32", ONE, "request", optional=False),
        Input("ignore_eos", "BOOL", ONE, "request", optional=False),
        Input("stream", "BOOL", ONE, "request", optional=False),
        *sampling_inputs("lmdeploy", floats="FP64"),
        Input("stop_words", "STRING", ANY, "request"),
        Input("bad_words", "STRING", ANY, "request"),
        Input("skip_special_tokens", "BOOL", ONE, "request"),
    ),
    outputs=(Output("response", "STRING", ANY, "always"),),
    max_batch_size=0,
    always="decoupled",
)


def check(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest for text over its limits."""
    limits = context.config.limits
    most = MAX_TOKEN_BYTES * context.model.max_seq_len
    batch.check_texts("prompt", 0, 1, most, "64 for each token of model.max_seq_len")
    for name in ("stop_words", "bad_words"):
        batch.check_texts(name, 0, limits.max_words, limits.max_word_bytes, "limits.max_word_bytes")


def parse(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    prompt = _read_prompt(batch, context, tools.tokenizer)
    stops, streaming = _read_words(batch, "stop_words"), bool(required(batch, "stream", 0))
    end_ids = () if required(batch, "ignore_eos", 0) else (*context.model.eos_ids, *tools.tokenizer.eos_ids)
    request = Request(
        input_token_ids=prompt,
        max_tokens=_read_max_tokens(batch),
        streaming=streaming or bool(stops),
        sampling_config=_read_sampling(batch),
        output_config=OutputConfig(exclude_input_from_output=True),
        end_ids=tuple(dict.fromkeys(end_ids)),
        bad_words=words_token_ids(tools.tokenizer, _read_words(batch, "bad_words")),
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
    )
    skip_special = batch.scalar("skip_special_tokens", 0)
    sequence = SequenceOutput(
        TextStream(
            tools.tokenizer, prompt, stops, skip_special_tokens=True if skip_special is None else bool(skip_special)
        ),
        streaming=streaming,
        every_token=context.config.triton.one_response_per_token,
        hidden_ends=request.end_ids,
    )
    return [Work(request, SeparateOutput([sequence], render))]


def render(deltas: Sequence[OutputDelta]) -> Arrays:
    return [("response", text_array([deltas[0].text]).reshape(()))]


def _read_prompt(batch: Batch, context: ServingContext, tokenizer: Tokenizer) -> list[int]:
    ids = prompt_ids(tokenizer, required(batch, "prompt", 0), context)
    if not ids:
        raise InvalidRequest("prompt holds no token; give at least one character")
    return ids


def _read_max_tokens(batch: Batch) -> int:
    max_tokens: int = required(batch, "max_tokens", 0)
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, at least 1 is needed")
    return max_tokens


def _read_words(batch: Batch, name: str) -> list[str]:
    return [word for word in batch.texts(name, 0) if word]


def _read_sampling(batch: Batch) -> SamplingConfig:
    """Decoding is greedy unless a temperature, top_p or top_k asks for sampling; then each request has a random seed."""
    config = SamplingConfig(**batch.fields("sampling", 0))
    if config.is_greedy:
        return config
    return SamplingConfig(**batch.fields("sampling", 0), seed=secrets.randbits(63))


LMDEPLOY = TextFront(TENSORS, check, parse, Dialect(prefixed("Error when processing request: ")))
