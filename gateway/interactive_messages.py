"""Messages of LMDeploy's own routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gateway.messages import ChatMessage, Seed, Text, Wire, Words


class InteractiveRequest(Wire):
    """POST /v1/chat/interactive. The defaults of sampling are LMDeploy's.

    With request_output_len 0 nothing is generated, and the session ends unless interactive_mode is true.
    """

    prompt: Text | Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    session_id: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1
    interactive_mode: bool = False
    stream: bool = False
    stop: bool | str | Words | None = None  # true: as cancel
    cancel: bool | None = None  # end the turn that is running in the session
    request_output_len: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # None: as many as fit
    min_new_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.8
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 40
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.8
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Seed | None = None
    adapter_name: Annotated[str, Field(max_length=256)] | None = None
    # Known and refused, but for their neutral values.
    image_url: None = None
    mm_processor_kwargs: None = None


class EncodeRequest(Wire):
    """POST /v1/encode"""

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=128, fail_fast=True)]
    do_preprocess: bool | None = None  # the text is the message of a conversation
    add_bos: Literal[True] | None = None  # the model's own


class InteractiveBody(BaseModel):
    """`tokens`: generated so far. `input_tokens`: of the prompt of this turn; in a stream 0 before the last chunk."""

    text: str
    tokens: int
    input_tokens: int
    history_tokens: int
    finish_reason: str | None


class EncodeBody(BaseModel):
    input_ids: list[int] | list[list[int]]
    length: int | list[int]
