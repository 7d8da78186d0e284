"""Messages of clients that generate nothing: embeddings of OpenAI's API, and rerank as Jina and Cohere have it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.messages import ModelRequest, Prompt, Text, Wire


class EmbeddingRequest(ModelRequest):
    """POST /v1/embeddings"""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class Document(Wire):
    text: Text


class RerankRequest(ModelRequest):
    """POST /v1/rerank. `instruction`: what the query looks for, in a sentence, in place of the reranker's usual one."""

    query: Annotated[Text, Field(min_length=1)]
    documents: Annotated[list[Text | Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    return_documents: bool | None = None
    instruction: Text | None = None
