"""Model `vllm`: the wire of Triton's vLLM backend. Tensors have no batch dimension; one element stands for one sequence.

A stream has one response for each step of a sequence, with at least one token. With several sequences each response has an
element for every sequence, which is empty for those without a new token. The flags `return_*` apply to every response, and the
values are of that response's tokens, except for `cumulative_logprob`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backend.api import ErrorCode, EverbatchError, FinishReason, InvalidRequest, OutputConfig, Request, Unsupported
from backend.api.config.schema import LimitsConfig
from backend.images.reader import Placed
from backend.serving.delivery.outputs import Render, text_array
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.dialect import Dialect
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import MAX_PARAMETERS, Parameters, ServingContext, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, refused
from backend.serving.wires.choices import choices_output, chosen
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.image_files import check_encoded, place_images
from backend.serving.wires.limits import MAX_TOKEN_BYTES, check_length, fitting_tokens, prompt_ids
from backend.serving.wires.named_adapters import NOT_SUPPORTED, VLLMS, named_adapter
from backend.serving.wires.vllm_log_probs import log_probs_json
from backend.serving.wires.vllm_sampling import TENSOR, VllmSampling, read_sampling
from backend.serving.work import Arrays, Work
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream
from backend.text.token_texts import TokenTexts
from backend.text.words import words_token_ids

FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
TENSORS = ModelTensors(
    "vllm",
    inputs=(
        Input("text_input", "STRING", ONE, "request", optional=False),
        Input("image", "STRING", ANY, "request"),  # files in base64, in the order of their places in the prompt
        Input("stream", "BOOL", ONE, "request"),
        Input(TENSOR, "STRING", ONE, "request"),
        Input("exclude_input_in_output", "BOOL", ONE, "request"),
        *(Input(name, "BOOL", ONE, "request") for name in FLAGS),
        *refused("an embedding", ("embedding_request", "STRING", ONE), neutral=("",)),
    ),
    outputs=(
        Output("text_output", "STRING", ANY, "always"),
        Output("finish_reason", "STRING", ANY, "return_finish_reason"),
        Output("cumulative_logprob", "FP32", ANY, "return_cumulative_logprob"),
        Output("logprobs", "STRING", ANY, "return_logprobs"),
        Output("num_input_tokens", "UINT32", ONE, "return_num_input_tokens"),
        Output("num_output_tokens", "UINT32", ANY, "return_num_output_tokens"),
    ),
    max_batch_size=0,
    always="decoupled",
)
CANCELLED = "Request was cancelled"
NO_ECHO = "When streaming, `exclude_input_in_output` = False is not allowed."


class Cancelled(EverbatchError):
    """A stream was cancelled by its client."""

    code = ErrorCode.CANCELLED


class Returned(NamedTuple):
    """Outputs of each response besides its text, by the names of the flags."""

    finish_reason: bool
    cumulative_logprob: bool
    logprobs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    log_probs: bool  # True if `logprobs` asks for log-probabilities

    @classmethod
    def read(cls, batch: Batch, asked: VllmSampling) -> Returned:
        flags = {name.removeprefix("return_"): bool(batch.scalar(name, 0)) for name in FLAGS}
        return cls(**flags, log_probs=flags["logprobs"] and asked.logprobs is not None)


def check(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest or Unsupported for errors that show without decoding text."""
    batch.refuse_what_is_not_built()
    prompt_bytes = MAX_TOKEN_BYTES * context.model.max_seq_len
    batch.check_texts("text_input", 0, 1, prompt_bytes, "64 for each token of model.max_seq_len")
    batch.check_texts(TENSOR, 0, 1, MAX_PARAMETERS)
    check_encoded(batch, "image", context)
    if batch.scalar("stream", 0) and batch.scalar("exclude_input_in_output", 0) is False:
        raise InvalidRequest(NO_ECHO)


def parse(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    limits = context.config.limits
    streaming = bool(batch.scalar("stream", 0))
    asked = read_sampling(batch.scalar(TENSOR, 0), parameters, limits, streaming)
    text: str = required(batch, "text_input", 0)
    encoded = [each for each in batch.texts("image", 0) if each]
    placed = _encode(text, encoded, asked.truncate_prompt_tokens, context, tools)
    ids, returned = placed.ids, Returned.read(batch, asked)
    most = fitting_tokens(context, len(ids))  # vLLM ends an output where the model ends, too, instead of refusing it
    request = Request(
        input_token_ids=ids,
        max_tokens=most if asked.max_tokens is None else min(asked.max_tokens, most),
        streaming=streaming or bool(asked.stops),
        sampling_config=asked.sampling_config(),
        output_config=_output_config(asked, returned, limits),
        end_ids=asked.end_ids(context, tools.tokenizer),
        bad_words=words_token_ids(tools.tokenizer, [word for word in asked.bad_words or [] if word]),
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
        guide=asked.guide(),
        images=placed.images,
        lora=named_adapter(asked.lora_name, context.adapters, context.config.lora.enabled, VLLMS),
    )
    prefix = "" if streaming or batch.scalar("exclude_input_in_output", 0) else text

    def new_sequence() -> SequenceOutput:
        return SequenceOutput(
            TextStream(tools.tokenizer, ids, asked.stops, asked.include_stop_str_in_output, asked.skip_special_tokens),
            streaming=streaming,
            prefix=prefix,
            every_token=True,
            hidden_ends=() if asked.include_stop_str_in_output else request.end_ids,
        )

    texts = [TokenTexts(tools.tokenizer, ids) for _ in range(asked.n)] if returned.log_probs else []
    render = renderer(asked, returned, len(ids), texts, streaming=streaming)
    return [Work(request, choices_output(asked, new_sequence, render, streaming=streaming, joint=True))]


def _encode(text: str, images: list[str], most: int | None, context: ServingContext, tools: TextTools) -> Placed:
    """The last `most` tokens of the text (None: all), with images in base64 in their places."""
    if most:
        ids = tools.tokenizer.encode(text)[-most:]
    else:
        ids = prompt_ids(tools.tokenizer, text, context)
    if not ids:
        raise InvalidRequest("text_input is empty; give at least one character")
    check_length(len(ids), context)
    return place_images(images, ids, context, tools) if images else Placed(ids, ())


def _output_config(asked: VllmSampling, returned: Returned, limits: LimitsConfig) -> OutputConfig:
    """The engine knows no ranks, so they are looked up among the most likely tokens: greedy it takes one to find the sampled
    one, else as many as may be asked for.
    """
    if returned.log_probs and asked.use_beam_search:
        raise Unsupported(
            "return_logprobs cannot be had with use_beam_search in this version; ask for return_cumulative_logprob"
        )
    num_top = 0
    if returned.log_probs:
        num_top = max(asked.logprobs or 0, 1) if asked.temperature == 0 else limits.max_top_log_probs
    return OutputConfig(
        return_log_probs=returned.cumulative_logprob or returned.log_probs or asked.is_ranked,
        top_log_probs=min(num_top, limits.max_top_log_probs),
        exclude_input_from_output=True,
    )


def renderer(
    asked: VllmSampling, returned: Returned, num_prompt_tokens: int, texts: Sequence[TokenTexts], *, streaming: bool
) -> Render:
    """Makes the arrays of a response. `texts`: of the tokens in the log-probabilities of each sequence; empty without them."""

    def render(every: Sequence[OutputDelta]) -> Arrays:
        deltas = chosen(asked, every)
        if streaming and any(one.finish is FinishReason.CANCELLED for one in deltas):
            raise Cancelled(CANCELLED)
        arrays: Arrays = [("text_output", text_array([one.text for one in deltas]))]
        if returned.finish_reason:
            arrays.append(("finish_reason", text_array([finish_name(one.finish) for one in deltas])))
        if returned.cumulative_logprob:
            arrays.append(("cumulative_logprob", np.array([one.cum_log_prob or 0.0 for one in deltas], np.float32)))
        if returned.logprobs:
            num_top = asked.logprobs or 0
            bodies = [log_probs_json(one, texts[one.sequence], num_top) if texts else b"null" for one in deltas]
            arrays.append(("logprobs", text_array(bodies)))
        if returned.num_input_tokens:
            arrays.append(("num_input_tokens", np.array([num_prompt_tokens], np.uint32)))
        if returned.num_output_tokens:
            arrays.append(("num_output_tokens", np.array([len(one.ids) for one in deltas], np.uint32)))
        return arrays

    return render


def finish_name(finish: FinishReason | None) -> str:
    """vLLM's name of a finish reason; the text `None` while the sequence runs."""
    if finish is None:
        return "None"
    name = finish.openai_name
    return name if name in ("stop", "length") else "abort"


def error_text(code: ErrorCode, message: str) -> str:
    """An error as vLLM's backend words it."""
    is_whole = message in (VLLMS.without_any, CANCELLED) or NOT_SUPPORTED in message
    return message if is_whole else f"Error generating stream: {message}"


VLLM = TextFront(TENSORS, check, parse, Dialect(error_text, log_name="vllm", every_step=True, reads_parameters=True))
