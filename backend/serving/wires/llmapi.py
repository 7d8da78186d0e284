"""The model `tensorrt_llm` in the form of TensorRT-LLM's LLM API: text in, text out, without a batch dimension.

`sampling_param_*` are fields of SamplingParams with its defaults: 32 tokens, and no echo of the prompt. Flags ask for outputs,
which every response then has. A stop request is answered with CANCELLED; the request that it stops ends with its output so far.

With `best_of` the answer is the most likely sequence, once all have ended. With beams every output has an element for each
beam, the best first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.api import InvalidRequest, OutputConfig, PerfMetrics, Request, SamplingConfig
from backend.api.limits import check_num_sequences
from backend.api.lora import LoraConfig
from backend.api.sampling import tensorrt_llm_sampling, without_unset
from backend.serving.delivery.outputs import BeamsOutput, JointOutput, Render, text_array
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.dialect import Dialect, prefixed
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, check_mode, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, refused, sampling_inputs
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.image_files import check_encoded, place_inputs
from backend.serving.wires.limits import MAX_TOKEN_BYTES, prompt_ids
from backend.serving.wires.named_adapters import named_adapter
from backend.serving.work import Arrays, Work
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from backend.text.words import words_token_ids

DEFAULT_MAX_TOKENS = 32
CANCELLED = "Request cancelled by client"
PREFIX = "sampling_param_"
_BY_PATH = "an adapter at a path of the client's (the server names adapters, --lora NAME=DIRECTORY; send lora_name)"

TENSORS = ModelTensors(
    "llmapi",
    inputs=(
        Input("text_input", "STRING", ANY, "request", optional=False),
        Input("streaming", "BOOL", ONE, "request"),
        *sampling_inputs("llmapi", PREFIX),
        Input(PREFIX + "max_tokens", "INT32", ONE, "request"),
        Input(PREFIX + "stop", "STRING", ANY, "request"),
        Input(PREFIX + "exclude_input_from_output", "BOOL", ONE, "request"),
        Input(PREFIX + "return_perf_metrics", "BOOL", ONE, "output.return_perf_metrics"),
        Input("return_finish_reason", "BOOL", ONE, "request"),
        Input("return_stop_reason", "BOOL", ONE, "request"),
        Input("return_cumulative_logprob", "BOOL", ONE, "output.return_log_probs"),
        Input("stop", "BOOL", ONE, "request"),
        Input(PREFIX + "logits_post_processor_name", "STRING", ONE, "request"),
        Input("image_url", "STRING", ANY, "request"),  # data: URLs, in the order of their places in the prompt
        Input("lora_name", "STRING", ONE, "request"),  # a name of lora.adapters
        # Without a name: a task id that the engine knows. With a name: the client's own id.
        Input("lora_id", "UINT64", ONE, "request"),
        *refused(_BY_PATH, ("lora_path", "STRING", ONE), neutral=("",)),
        *refused(_BY_PATH, ("lora_ckpt_source", "STRING", ONE), neutral=("", "hf")),
    ),
    outputs=(
        Output("text_output", "STRING", ANY, "always"),
        Output("finish_reason", "STRING", ANY, "return_finish_reason: None while it runs"),
        Output("stop_reason", "STRING", ANY, "return_stop_reason: the stop string, None without one"),
        Output("cumulative_logprob", "FP32", ANY, "return_cumulative_logprob"),
        *(
            Output(name, dtype, dims, PREFIX + "return_perf_metrics")
            for name, dtype, dims in (
                ("kv_cache_reused_block", "INT32", ANY),
                ("kv_cache_missed_block", "INT32", ANY),
                ("kv_cache_alloc_new_blocks", "INT32", ANY),
                ("kv_cache_alloc_total_blocks", "INT32", ANY),
                ("kv_cache_hit_rate", "FP32", ANY),
                ("arrival_time_ns", "INT64", ONE),
                ("first_scheduled_time_ns", "INT64", ONE),
                ("first_token_time_ns", "INT64", ONE),
                ("last_token_time_ns", "INT64", ONE),
                ("acceptance_rate", "FP32", ONE),
                ("total_accepted_draft_tokens", "INT32", ONE),
                ("total_draft_tokens", "INT32", ONE),
            )
        ),
    ),
    max_batch_size=0,
)


def check(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest or Unsupported for all that can be found without decoding text."""
    batch.refuse_what_is_not_built()
    check_mode(batch, "streaming", context.decoupled)
    limits = context.config.limits
    most = MAX_TOKEN_BYTES * context.model.max_seq_len
    batch.check_texts("text_input", 0, 1, most, "64 for each token of model.max_seq_len")
    check_encoded(batch, "image_url", context)
    batch.check_texts(PREFIX + "stop", 0, limits.max_words, limits.max_word_bytes, "limits.max_word_bytes")


def parse(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    """The one row of a request. Raises InvalidRequest."""
    text = required(batch, "text_input", 0)
    placed = place_inputs(batch, 0, _prompt_ids(text, context, tools.tokenizer), context, tools, urls="image_url")
    ids = placed.ids
    stops = [stop for stop in batch.texts(PREFIX + "stop", 0) if stop]
    streaming = bool(batch.scalar("streaming", 0))
    sampling = _sampling(batch)
    best_of, has_beams = sampling.num_return_sequences or 1, sampling.beam_width > 1
    _check_best_of(sampling, streaming, context.config.limits.max_queue_size)
    asked = batch.fields("output", 0)
    asked["return_log_probs"] = (
        asked.get("return_log_probs", False) or best_of > 1
    )  # they decide which sequence is the most likely
    request = Request(
        input_token_ids=ids,
        max_tokens=_max_tokens(batch),
        streaming=streaming or (bool(stops) and not has_beams),
        sampling_config=sampling,
        output_config=OutputConfig(**asked, exclude_input_from_output=True),
        end_ids=tuple(dict.fromkeys([*context.model.eos_ids, *tools.tokenizer.eos_ids])),
        stop_words=words_token_ids(tools.tokenizer, stops) if has_beams else [],
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
        logits_post_processor=batch.scalar(PREFIX + "logits_post_processor_name", 0) or "",
        images=placed.images,
        lora=_adapter(batch, context),
    )
    echoes = batch.scalar(PREFIX + "exclude_input_from_output", 0) is False and not streaming

    def new_sequence() -> SequenceOutput:
        return SequenceOutput(
            TextStream(tools.tokenizer, ids, stops),
            streaming=streaming,
            prefix=text if echoes else "",
            every_token=context.config.triton.one_response_per_token,
        )

    render = renderer(batch)
    if has_beams:
        return [Work(request, BeamsOutput(new_sequence, render, streaming=streaming))]
    sequences = [new_sequence() for _ in range(best_of)]
    return [Work(request, JointOutput(sequences, lambda deltas: render([_most_likely(deltas)]), streaming=streaming))]


def _adapter(batch: Batch, context: ServingContext) -> LoraConfig | None:
    name, task_id = batch.scalar("lora_name", 0), batch.scalar("lora_id", 0)
    if name:
        return named_adapter(name, context.adapters, context.config.lora.enabled)
    return LoraConfig(int(task_id)) if task_id else None


def _most_likely(deltas: Sequence[OutputDelta]) -> OutputDelta:
    return max(deltas, key=lambda delta: delta.cum_log_prob or 0.0)


def _check_best_of(sampling: SamplingConfig, streaming: bool, most: int) -> None:
    """Raise InvalidRequest where the most likely of several sequences cannot be known, or all are alike."""
    best_of, name = sampling.num_return_sequences, PREFIX + "best_of"
    if best_of in (None, 1):
        return
    check_num_sequences(best_of, most)
    if sampling.beam_width > 1:
        raise InvalidRequest(f"{name} is {best_of} beside {PREFIX}beam_width {sampling.beam_width}; send one of them")
    if streaming:
        raise InvalidRequest(
            f"{name} is {best_of}, and the most likely sequence is known only when all have ended; leave it or streaming out"
        )
    if sampling.is_greedy:
        raise InvalidRequest(
            f"{name} is {best_of}, and decoding is greedy, so that all sequences are the same; set {PREFIX}top_k or "
            f"{PREFIX}top_p, or leave it out"
        )


def _prompt_ids(text: str, context: ServingContext, tokenizer: Tokenizer) -> list[int]:
    if not text:
        raise InvalidRequest("text_input is empty; give at least one character")
    ids = prompt_ids(tokenizer, text, context, room=0)
    if not ids:
        raise InvalidRequest("the prompt holds no token; give more text")
    return ids


def _max_tokens(batch: Batch) -> int:
    given = batch.scalar(PREFIX + "max_tokens", 0)
    max_tokens = DEFAULT_MAX_TOKENS if given is None else int(given)
    if max_tokens < 1:
        raise InvalidRequest(f"{PREFIX}max_tokens is {max_tokens}, at least 1 is needed; leave it out for 32")
    return max_tokens


def _sampling(batch: Batch) -> SamplingConfig:
    return tensorrt_llm_sampling(**without_unset(batch.fields("sampling", 0)))


def renderer(batch: Batch) -> Render:
    """Makes the outputs that the request's flags ask for."""
    names = ("finish_reason", "stop_reason", "cumulative_logprob")
    finish_reason, stop_reason, cumulative = (bool(batch.scalar(f"return_{name}", 0)) for name in names)

    def render(deltas: Sequence[OutputDelta]) -> Arrays:
        arrays: Arrays = [("text_output", text_array([delta.text for delta in deltas]))]
        if finish_reason:
            ends = [str(delta.finish.openai_name if delta.finish else None) for delta in deltas]
            arrays.append(("finish_reason", text_array(ends)))
        if stop_reason:
            stops = [delta.stop if isinstance(delta.stop, str) else "None" for delta in deltas]
            arrays.append(("stop_reason", text_array(stops)))
        if cumulative:
            arrays.append(("cumulative_logprob", np.array([delta.cum_log_prob or 0.0 for delta in deltas], np.float32)))
        perf = deltas[0].perf
        return arrays + (_perf_arrays(perf) if perf is not None else [])

    return render


def _perf_arrays(perf: PerfMetrics) -> Arrays:
    total = perf.num_new_blocks + perf.num_reused_blocks
    values: tuple[tuple[str, type[np.generic], float], ...] = (
        ("kv_cache_reused_block", np.int32, perf.num_reused_blocks),
        ("kv_cache_missed_block", np.int32, perf.num_new_blocks),
        ("kv_cache_alloc_new_blocks", np.int32, perf.num_new_blocks),
        ("kv_cache_alloc_total_blocks", np.int32, perf.num_new_blocks),
        ("kv_cache_hit_rate", np.float32, perf.num_reused_blocks / max(1, total)),
        ("arrival_time_ns", np.int64, perf.arrival_ns),
        ("first_scheduled_time_ns", np.int64, perf.first_scheduled_ns),
        ("first_token_time_ns", np.int64, perf.first_token_ns),
        ("last_token_time_ns", np.int64, perf.last_token_ns),
        ("acceptance_rate", np.float32, perf.acceptance_rate),
        ("total_accepted_draft_tokens", np.int32, perf.num_accepted_draft_tokens),
        ("total_draft_tokens", np.int32, perf.num_draft_tokens),
    )
    return [(name, np.array([value], dtype)) for name, dtype, value in values]


LLMAPI = TextFront(TENSORS, check, parse, Dialect(prefixed("Error generating request: "), stop_error=CANCELLED))
