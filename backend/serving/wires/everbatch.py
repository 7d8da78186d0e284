"""Model `everbatch`, this project's own wire: one JSON object in, JSON objects out. What the OpenAI gateway speaks.

    request   STRING [1]   {"messages": [...]} or {"prompt": "..."} or {"prompt_token_ids": [...]} or {"fill": {...}}, and the
                           fields of Generate
    response  STRING [n]   {"text": "...", "token_ids": [...]}, with `logprobs` where asked for; the last one of a sequence has
                           `finish_reason`, `stop_reason` and `usage` besides, and the first one of a stream the `seed` where
                           the request has none and samples

`resume` goes on with a stream whose server has ended: the request as it was, with its seed, and what came of each sequence.

With `prompt_logprobs` the first object of each sequence has the log-probabilities of the prompt's tokens under that name, and
with `tell_prompt` it has `prompt`: how many tokens that has, how many of them were cached, and which they are.

With `n` above 1 each object has the `index` of its sequence: a response of a stream holds one sequence, and the only response of
a request that does not stream holds all.

One tensor each way is also the cheapest way through Triton. Some objects are commands (adapter_commands.py,
vector_commands.py, look_command.py, metrics_command.py). A stop request (`stop`: true) ends the request of its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from backend.api import InvalidRequest, OutputConfig, Request
from backend.api.guide import Guide
from backend.api.images import ImageInput
from backend.api.limits import check_ids
from backend.api.response import PromptLogProb
from backend.core.messages import Delivered
from backend.core.thinking import ReasoningCounter
from backend.executor.prompt_adapters import PromptAdapters, named_table, with_table
from backend.serving.delivery.outputs import Answer, Render, text_array
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, required
from backend.serving.intake.submit import check_resumed
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output
from backend.serving.wires.capabilities import capabilities_of
from backend.serving.wires.choices import choices_output, chosen
from backend.serving.wires.commands import is_command, is_look, read_command, read_look, read_metrics
from backend.serving.wires.fill import Fill
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.generated import Choice, Generated, PromptReport, Usage
from backend.serving.wires.image_files import TWICE, most_encoded_bytes, place_images
from backend.serving.wires.limits import (
    MAX_TOKEN_BYTES,
    check_length,
    check_stops,
    fitting_tokens,
    most_tokens,
    prompt_ids,
    timeout_of,
)
from backend.serving.wires.named_adapters import named_adapter
from backend.serving.wires.named_sampling import NamedSampling, check_choices, from_json, json_value
from backend.serving.wires.vector_commands import is_vector_command, read_vector_command
from backend.serving.wires.visible import ReasoningMarks, check_visible, visible_ids
from backend.serving.work import Arrays, Work
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream
from backend.text.token_texts import PromptTexts, TokenText, TokenTexts
from backend.text.tokenizer import Tokenizer
from backend.text.words import words_token_ids

TENSORS = ModelTensors(
    "everbatch",
    inputs=(
        Input("request", "STRING", ONE, "request", optional=False),
        Input("stop", "BOOL", ONE, "request"),
    ),
    outputs=(Output("response", "STRING", ANY, "always"),),
    max_batch_size=0,
    always="decoupled",
)
PROMPT_ADAPTERS = PromptAdapters()  # each stub reads its own
_PROMPTS = ("messages", "prompt", "prompt_token_ids", "fill")
MAX_ESCAPED = 6  # bytes of JSON for one character of text, at the most: \u0000


class Generate(NamedSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request. Exactly one of `messages`, `prompt`, `prompt_token_ids` and `fill` is given."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    fill: Fill | None = None  # the output is the text between two others
    stream: bool = False
    include_stop_in_output: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # most likely tokens at each position of the prompt; 0: only the prompt's own
    timeout_s: float | None = None
    skip_special_tokens: bool = True  # False: special tokens that are generated are part of the text
    visible_tokens: list[str] = []  # special tokens that are part of the text in any case, by their texts
    reasoning: ReasoningMarks | None = None  # how the model marks its reasoning
    tools: list[dict[str, Any]] | None = None  # that the chat template shows to the model
    add_generation_prompt: bool = True  # True if the chat template begins the answer
    continue_final_message: bool = False  # the output goes on with the last message
    chat_template_kwargs: dict[str, Any] | None = None  # more variables for the chat template
    guide: Guide | None = None  # {"type": "json_schema", "text": "..."}
    lora_name: str | None = None  # one of lora.adapters
    prompt_adapter_name: str | None = None  # one of prompt_adapters.adapters
    tell_prompt: Literal["counts", "token_ids"] | None = None  # facts in the first object of each sequence
    tokenize: bool = False  # nothing is computed: token_ids are those of the prompt
    images: list[str] = []  # files in base64, in the order of their places in the prompt
    tell_tokenizer: bool = False  # with `tokenize`: its special tokens and the chat template
    priority: float = 0.5  # 0: the request runs in what all others leave (docs/batches.md)
    resume: list[Resumed] | None = None  # the output so far of all n sequences; needs `stream` and the seed


class Resumed(Struct, frozen=True, forbid_unknown_fields=True):
    """The output so far of one sequence: all token ids, and whether the client has received its finish_reason."""

    token_ids: list[int] = []
    ended: bool = False


class _Prompt(NamedTuple):
    text: str
    ids: list[int]
    images: tuple[ImageInput, ...] = ()
    end_ids: tuple[int, ...] = ()  # tokens that end the output, besides those of every request
    files_left_out: int = 0  # from `fill`, for lack of room


def check(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest for a request of more bytes than any prompt of this model has."""
    most = MAX_TOKEN_BYTES * MAX_ESCAPED * context.model.max_seq_len
    what = "384 for each token of model.max_seq_len"
    if context.model.image_token_id >= 0:
        most += most_encoded_bytes(context)
        what += f", and {TWICE}"
    batch.check_texts("request", 0, 1, most, what)


def parse(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    value = json_value("request", required(batch, "request", 0))
    if is_command(value):
        return [read_command(value, context)]
    if is_look(value):
        return [read_look(value)]
    if is_vector_command(value):
        return [read_vector_command(value, context, parameters, tools)]
    asked: Generate = from_json("request", value, Generate)
    check_stops("stop", asked.stops, context.config.limits)
    check_stops("bad_words", asked.bad_words or [], context.config.limits)
    check_choices(asked, asked.stream)
    check_visible(asked.visible_tokens)
    prompt = _read_prompt(asked, context, tools)
    reasoning = None if asked.reasoning is None else asked.reasoning.found(prompt.text, tools.tokenizer)
    if asked.tokenize:
        return [Work(None, Answer(_tokenized(asked, prompt, context, tools)))]
    table = None
    if asked.prompt_adapter_name is not None:
        named = context.config.prompt_adapters.directories
        table = named_table(asked.prompt_adapter_name, named, PROMPT_ADAPTERS)
    num_prompt = len(prompt.ids) + (0 if table is None else table.shape[0])
    request = Request(
        input_token_ids=prompt.ids,
        max_tokens=fitting_tokens(context, num_prompt) if asked.max_tokens is None else _not_negative(asked.max_tokens),
        streaming=asked.stream or bool(asked.stops),
        sampling_config=asked.sampling_config(context.model.default_sampling),
        output_config=OutputConfig(
            return_log_probs=asked.logprobs is not None or asked.is_ranked,
            top_log_probs=asked.logprobs or 0,
            prompt_log_probs=asked.prompt_logprobs,
            exclude_input_from_output=True,
            return_perf_metrics=True,
        ),
        end_ids=tuple(dict.fromkeys([*asked.end_ids(context, tools.tokenizer), *prompt.end_ids])),
        bad_words=words_token_ids(tools.tokenizer, [word for word in asked.bad_words or [] if word]),
        timeout_s=timeout_of(
            parameters.timeout_s if asked.timeout_s is None else asked.timeout_s, asked.priority, context
        ),
        priority=asked.priority,
        cache_salt=parameters.namespace,
        guide=asked.guide,
        thinking=None if reasoning is None else reasoning.for_engine(asked.guide is not None),
        images=prompt.images,
        lora=named_adapter(asked.lora_name, context.adapters, context.config.lora.enabled),
    )
    if table is not None:
        request = with_table(request, table, context.model.vocab_size)
    delivered = [Delivered(one.token_ids, has_ended=one.ended) for one in asked.resume or ()]
    check_resumed(request, delivered, context.model, has_seed=asked.seed is not None, streaming=asked.stream)
    left = iter(delivered)
    shown = visible_ids(asked.visible_tokens, tools.tokenizer)

    def new_sequence() -> SequenceOutput:
        sequence = SequenceOutput(
            TextStream(
                tools.tokenizer,
                prompt.ids,
                asked.stops,
                include_stop=asked.include_stop_in_output,
                skip_special_tokens=asked.skip_special_tokens,
                shown_ids=shown,
            ),
            streaming=asked.stream,
            prefix=prompt.text if asked.echo else ("" if reasoning is None else reasoning.begun),
            every_token=context.config.triton.one_response_per_token,
            hidden_ends=() if asked.include_stop_in_output else request.end_ids,
        )
        if (had := next(left, None)) is not None:
            sequence.take_up(had.token_ids, had.has_ended)
        return sequence

    texts = [] if asked.logprobs is None else [TokenTexts(tools.tokenizer, prompt.ids) for _ in range(asked.n)]
    counters = [] if reasoning is None else [ReasoningCounter(reasoning.thinking) for _ in range(asked.n)]
    for index, had in enumerate(delivered):
        for of_tokens in texts[index : index + 1]:
            for token_id in had.token_ids:
                of_tokens.push(token_id)
        for counter in counters[index : index + 1]:
            counter.push(had.token_ids)
    sampling = request.sampling_config
    chosen_seed = None if asked.seed is not None or sampling.is_greedy or not asked.stream else sampling.seed
    render = renderer(asked, prompt, texts, tools.tokenizer, chosen_seed, counters)
    output = choices_output(asked, new_sequence, render, streaming=asked.stream, joint=not asked.stream)
    return [Work(request, output, delivered)]


def _tokenized(asked: Generate, prompt: _Prompt, context: ServingContext, tools: TextTools) -> Arrays:
    """`text` is that of the tokens where `echo` asks for it."""
    reply = Generated(
        prompt.text if asked.echo else "",
        prompt.ids,
        finish_reason="length",
        stop_reason=None,
        usage=Usage(len(prompt.ids), 0, 0),
        max_model_len=most_tokens(context),
        takes_images=context.model.image_token_id >= 0,
        capabilities=capabilities_of(context.model, tools),
        tokenizer=_of_tokenizer(tools, context) if asked.tell_tokenizer else UNSET,
    )
    return [("response", text_array([msgspec.json.encode(reply)]))]


def _of_tokenizer(tools: TextTools, context: ServingContext) -> dict[str, str]:
    source = tools.template_for(context.model).source
    return tools.tokenizer.special_tokens | ({} if source is None else {"chat_template": source})


def _not_negative(max_tokens: int) -> int:
    if max_tokens < 0:
        raise InvalidRequest(f"max_tokens is {max_tokens}, the least is 0; leave it out for as many as fit")
    return max_tokens


def _read_prompt(asked: Generate, context: ServingContext, tools: TextTools) -> _Prompt:
    given = [name for name in _PROMPTS if getattr(asked, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise InvalidRequest(f"exactly one of {', '.join(_PROMPTS)} is expected, {found} is given")
    if asked.fill is not None:
        return _read_fill(asked, asked.fill, context, tools)
    if asked.prompt_token_ids is not None:
        ids = asked.prompt_token_ids
        check_length(len(ids), context)  # first, because it costs nothing
        check_ids(
            "prompt token", ids, context.model.vocab_size
        )  # checked first, because the tokenizer's errors for unknown ids are unclear
        is_shown = asked.echo or asked.prompt_logprobs is not None
        text = tools.tokenizer.decode(ids, asked.skip_special_tokens) if is_shown else ""
    elif asked.prompt is not None:
        text, ids = asked.prompt, prompt_ids(tools.tokenizer, asked.prompt, context)
    else:
        text = tools.template_for(context.model).render(
            asked.messages or [],
            asked.add_generation_prompt,
            asked.tools,
            asked.chat_template_kwargs,
            asked.continue_final_message,
        )
        ids = prompt_ids(tools.tokenizer, text, context, add_special_tokens=False)  # the template writes its own
    if not ids:
        raise InvalidRequest("the prompt holds no token; give more text")
    if asked.images:
        placed = place_images(asked.images, ids, context, tools)
        return _Prompt(text, placed.ids, placed.images)
    return _Prompt(text, ids)


def _read_fill(asked: Generate, fill: Fill, context: ServingContext, tools: TextTools) -> _Prompt:
    if asked.echo or asked.prompt_logprobs is not None:
        name = "echo" if asked.echo else "prompt_logprobs"
        raise InvalidRequest(f"{name} cannot be had with fill, whose prompt is no text of the client's; leave it out")
    found = fill.filling(tools.fim, tools.tokenizer, asked.max_tokens, context)
    check_length(len(found.ids), context)
    return _Prompt(
        "", found.ids, end_ids=() if asked.ignore_eos else found.end_ids, files_left_out=found.files_left_out
    )


def renderer(
    asked: Generate,
    prompt: _Prompt,
    texts: Sequence[TokenTexts],
    tokenizer: Tokenizer,
    seed: int | None = None,
    counters: Sequence[ReasoningCounter] = (),
) -> Render:
    """`texts`: token texts of each sequence, for its log-probabilities; empty without. `seed`: the one to report, if any.
    `counters`: of the reasoning of each sequence; empty if it is not told how that is marked.
    """
    seeds = iter(()) if seed is None else iter((seed,))  # for the first object
    of_prompt = _OfPrompt(prompt, tokenizer, asked.n) if asked.prompt_logprobs is not None else None
    untold = set(range(asked.n)) if asked.tell_prompt is not None else set()

    def render(deltas: Sequence[OutputDelta]) -> Arrays:
        kept = chosen(asked, deltas)
        discarded = sum(delta.num_tokens for delta in deltas) - sum(delta.num_tokens for delta in kept)
        if of_prompt is not None:
            of_prompt.take(deltas)
        bodies = [msgspec.json.encode(_generated(delta, 0 if delta.sequence else discarded)) for delta in kept]
        return [("response", text_array(bodies))]

    def _generated(delta: OutputDelta, discarded: int) -> Generated:
        cached = 0 if delta.perf is None else delta.perf.num_cached_tokens
        more: dict[str, Any] = {}
        if delta.sequence in untold:
            untold.remove(delta.sequence)
            ids = prompt.ids if asked.tell_prompt == "token_ids" else UNSET
            more["prompt"] = PromptReport(len(prompt.ids), cached, ids, prompt.files_left_out or UNSET)
        if delta.perf is not None and delta.perf.guide_notes and delta.num_tokens == len(delta.ids):  # the first one
            more["guide_notes"] = delta.perf.guide_notes
        if counters:
            counters[delta.sequence].push(delta.ids)
        if delta.finish is not None:
            thought = counters[delta.sequence].count if counters else UNSET
            more |= {
                "finish_reason": delta.finish.openai_name,
                "stop_reason": delta.stop,
                "usage": Usage(len(prompt.ids), delta.num_tokens, cached, discarded or UNSET, thought),
            }
        index = delta.sequence if asked.n > 1 else UNSET
        choices = _choices(delta, texts[delta.sequence]) if texts else UNSET
        prompt_choices = UNSET if of_prompt is None else of_prompt.once(delta.sequence)
        return Generated(delta.text, delta.ids, index, choices, prompt_choices, **more, seed=next(seeds, UNSET))

    return render


class _OfPrompt:
    """The log-probabilities of the prompt. The engine returns them with the first sequence, a client gets them with each."""

    def __init__(self, prompt: _Prompt, tokenizer: Tokenizer, num_sequences: int) -> None:
        self._prompt, self._tokenizer = prompt, tokenizer
        self._encoded: msgspec.Raw | None = None
        self._untold = set(range(num_sequences))

    def take(self, deltas: Sequence[OutputDelta]) -> None:
        """The first call must be for a response that includes the first sequence."""
        if self._encoded is None:
            self._encoded = msgspec.Raw(msgspec.json.encode(self._choices(deltas[0].prompt_log_probs or [])))

    def once(self, sequence: int) -> msgspec.Raw | UnsetType:
        if sequence not in self._untold or self._encoded is None:
            return UNSET
        self._untold.remove(sequence)
        return self._encoded

    def _choices(self, log_probs: Sequence[PromptLogProb]) -> list[Choice]:
        texts = PromptTexts(self._tokenizer, self._prompt.text)
        choices = [_choice(self._prompt.ids[0], texts.push(self._prompt.ids[0]), None, [])]
        for token_id, found in zip(self._prompt.ids[1:], log_probs):
            others = [_choice(one.token_id, texts.alternative(one.token_id), one.log_prob) for one in found.top]
            choices.append(_choice(token_id, texts.push(token_id), found.log_prob, others))
        return choices


def _choices(delta: OutputDelta, texts: TokenTexts) -> list[Choice]:
    choices = []
    tops = delta.top_log_probs or [[] for _ in delta.ids]
    for token_id, log_prob, top in zip(delta.ids, delta.log_probs or [], tops):
        others = [_choice(one.token_id, texts.alternative(one.token_id), one.log_prob) for one in top]
        choices.append(_choice(token_id, texts.push(token_id), log_prob, others))
    return choices


def _choice(token_id: int, token: TokenText, log_prob: float | None, top: list[Choice] | UnsetType = UNSET) -> Choice:
    return Choice(token_id, token.text, list(token.raw), log_prob, top)


EVERBATCH = TextFront(TENSORS, check, parse, at_once=read_metrics, is_for_chats=True)
