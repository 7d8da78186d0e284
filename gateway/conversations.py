"""/v1/conversations: items that are kept under one id, for any number of responses to go on from and to add to."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response

from gateway.core import Gateway
from gateway.errors import GatewayError
from gateway.items import LISTED, items_of, listed, new_id
from gateway.openapi import answer_of, as_json, body_of
from gateway.outputs import ConversationBody, DeletedConversation, ItemBody, ItemList
from gateway.request_context import visit_of
from gateway.response_messages import ConversationItems, ConversationMetadata, NewConversation
from gateway.store import Conversation


def add_conversation_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/conversations", openapi_extra=body_of(NewConversation), responses=answer_of(ConversationBody))
    async def create_conversation(request: Request) -> Response:
        message, context = await gateway.read_body(NewConversation, request), visit_of(request.scope)
        items = items_of(message.items or [])
        conversation = Conversation(new_id("conv"), int(time.time()), message.metadata or {}).with_items(items)
        gateway.store.put(context.namespace, conversation)
        return as_json(_shown(conversation))

    @api.get("/v1/conversations/{conversation_id}", responses=answer_of(ConversationBody))
    async def get_conversation(request: Request, conversation_id: str) -> Response:
        return as_json(_shown(_found(gateway, request, conversation_id)))

    @api.post(
        "/v1/conversations/{conversation_id}",
        openapi_extra=body_of(ConversationMetadata),
        responses=answer_of(ConversationBody),
    )
    async def update_conversation(request: Request, conversation_id: str) -> Response:
        message = await gateway.read_body(ConversationMetadata, request)
        changed = replace(_found(gateway, request, conversation_id), metadata=message.metadata)
        gateway.store.put(visit_of(request.scope).namespace, changed)
        return as_json(_shown(changed))

    @api.delete("/v1/conversations/{conversation_id}", responses=answer_of(DeletedConversation))
    async def delete_conversation(request: Request, conversation_id: str) -> Response:
        found = _found(gateway, request, conversation_id)
        gateway.store.delete(visit_of(request.scope).namespace, found.id)
        return as_json({"id": found.id, "object": "conversation.deleted", "deleted": True})

    _add_item_routes(api, gateway)


def _add_item_routes(api: FastAPI, gateway: Gateway) -> None:
    path = "/v1/conversations/{conversation_id}/items"

    @api.post(path, openapi_extra=body_of(ConversationItems), responses=answer_of(ItemList))
    async def add_items(request: Request, conversation_id: str) -> Response:
        message = await gateway.read_body(ConversationItems, request)
        added = items_of(message.items)
        found = _found(gateway, request, conversation_id)
        gateway.store.put(visit_of(request.scope).namespace, found.with_items(added))
        return as_json(listed(added, str(max(1, min(len(added), 100))), "asc", ""))

    @api.get(path, responses=answer_of(ItemList))
    async def list_items(
        request: Request, conversation_id: str, limit: str = str(LISTED), order: str = "desc", after: str = ""
    ) -> Response:
        return as_json(listed(_found(gateway, request, conversation_id).items, limit, order, after))

    @api.get(path + "/{item_id}", responses=answer_of(ItemBody))
    async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
        found = _found(gateway, request, conversation_id)
        item = next((item for item in found.items if item["id"] == item_id), None)
        if item is None:
            raise _no_item()
        return as_json(item)

    @api.delete(path + "/{item_id}", responses=answer_of(ConversationBody))
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
        found = _found(gateway, request, conversation_id)
        items = found.items
        left = [item for item in items if item["id"] != item_id]
        if len(left) == len(items):
            raise _no_item()
        gateway.store.put(visit_of(request.scope).namespace, replace(found, parent=None).with_items(left))
        return as_json(_shown(found))


def _found(gateway: Gateway, request: Request, conversation_id: str) -> Conversation:
    """Raises GatewayError(404)."""
    return gateway.conversation(conversation_id, visit_of(request.scope).namespace)


def _no_item() -> GatewayError:
    return GatewayError(404, "this conversation has no such item", "item_id", "not_found")


def _shown(conversation: Conversation) -> dict[str, Any]:
    own = {"id": conversation.id, "object": "conversation", "created_at": conversation.created}
    return {**own, "metadata": conversation.metadata}
