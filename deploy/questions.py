"""How to ask the models of each protocol for text over Triton's HTTP `generate`: for the launcher's first token and the examples
that it prints. A model is known by the tensors that its configuration names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.repository import Model

Body = dict[str, Any]


@dataclass(frozen=True)
class QuestionForm:
    """One protocol's request. `tensors`: those that only its models have, all together; `answer`: the output with the text."""

    tensors: frozenset[str]
    answer: str
    body: Callable[[str, int, bool], Body]  # (prompt, max tokens, stream) -> the request's body


def _trtllm(prompt: str, tokens: int, stream: bool) -> Body:
    return {"text_input": prompt, "max_tokens": tokens, "stream": stream}


def _vllm(prompt: str, tokens: int, stream: bool) -> Body:
    return {"text_input": prompt, "stream": stream, "sampling_parameters": json.dumps({"max_tokens": tokens})}


def _llmapi(prompt: str, tokens: int, stream: bool) -> Body:
    return {"text_input": prompt, "sampling_param_max_tokens": tokens, "streaming": stream}


def _lmdeploy(prompt: str, tokens: int, stream: bool) -> Body:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": False, "stream": stream}


def _everbatch(prompt: str, tokens: int, stream: bool) -> Body:
    return {"request": json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": stream})}


def _tokens(prompt: str, tokens: int, stream: bool) -> Body:
    """Token ids in place of the prompt, small ones, which every model has."""
    return {"input_ids": [10, 11, 12], "input_lengths": 3, "request_output_len": tokens}


VLLM = QuestionForm(frozenset({"text_input", "sampling_parameters", "text_output"}), "text_output", _vllm)
FORMS = (  # in the order in which they are preferred
    QuestionForm(frozenset({"text_input", "max_tokens", "text_output"}), "text_output", _trtllm),
    VLLM,
    QuestionForm(frozenset({"text_input", "sampling_param_max_tokens", "text_output"}), "text_output", _llmapi),
    QuestionForm(frozenset({"prompt", "max_tokens", "ignore_eos", "response"}), "response", _lmdeploy),
    QuestionForm(frozenset({"request", "response"}), "response", _everbatch),
)
TOKENS = QuestionForm(
    frozenset({"input_ids", "input_lengths", "request_output_len", "output_ids"}), "output_ids", _tokens
)
# Forms in the order of preference for an example. The project's own wire comes last: every server has it beside its profile.
SHOWN = (*FORMS[:-1], TOKENS, FORMS[-1])


@dataclass(frozen=True)
class AskedModel:
    """A text model of this server, and how it is asked."""

    name: str
    form: QuestionForm


def form_of(model: Model, forms: Sequence[QuestionForm] = FORMS) -> QuestionForm | None:
    """None for a model of none of the forms."""
    if model.backend == "vllm":  # Its configuration may be one without tensors, which the backend completes.
        return VLLM
    return next((form for form in forms if form.tensors <= model.tensors), None)


def text_model(models: Sequence[Model], name: str = "") -> AskedModel | None:
    """The model `name`, or else the one of this server that is most telling to ask; None where none takes text."""
    found = _first([model for model in models if name in ("", model.name)], FORMS)
    return None if found is None else AskedModel(found[1].name, found[0])


def shown_model(models: Sequence[Model]) -> tuple[QuestionForm, Model] | None:
    """The model of this server that is most telling to show, and its form; None where there is none."""
    return _first(models, SHOWN)


def _first(models: Sequence[Model], forms: Sequence[QuestionForm]) -> tuple[QuestionForm, Model] | None:
    found = [(form, model) for model in models if (form := form_of(model, forms)) is not None]
    return min(found, key=lambda pair: forms.index(pair[0]), default=None)
