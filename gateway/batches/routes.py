"""/v1/files and /v1/batches of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from gateway.batches.database import MOST_LINES
from gateway.batches.messages import BatchBody, BatchList, DeletedFile, FileBody, FileList, NewBatch
from gateway.batches.records import KEPT_S, BatchRecord, FileRecord, new_id
from gateway.batches.runner import Batches
from gateway.batches.upload import Incoming, read_form, too_large
from gateway.errors import GatewayError, too_many_of_one
from gateway.items import listed
from gateway.openapi import answer_of, as_json, body_of
from gateway.request_context import visit_of

if TYPE_CHECKING:
    from gateway.core import Gateway

WINDOW_S = 24 * 3600
FORM_BYTES = 64 * 1024  # a form's fields beside its file
SENT_BYTES = 1 << 18  # read from a file at once
MOST_FILES, USUAL_BATCHES = 10_000, "20"  # entries of a list
_FORM = {"type": "object", "required": ["purpose", "file"]}
_FIELDS = {"purpose": {"type": "string", "enum": ["batch"]}, "file": {"type": "string", "format": "binary"}}
UPLOAD = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM | {"properties": _FIELDS}}}}
}


@asynccontextmanager
async def answering_batches(gateway: Gateway, api: FastAPI) -> AsyncIterator[None]:
    """While the application runs: `api` answers the lines of batches, where there are some."""
    if gateway.batches is None:
        yield
        return
    await gateway.batches.start(api)
    try:
        yield
    finally:
        await gateway.batches.stop()


def add_batch_routes(api: FastAPI, gateway: Gateway) -> None:
    _add_file_routes(api, gateway)

    @api.post("/v1/batches", openapi_extra=body_of(NewBatch), responses=answer_of(BatchBody))
    async def create_batch(request: Request) -> Response:
        batches, context = _batches(gateway), visit_of(request.scope)
        message = await gateway.read_body(NewBatch, request)
        if len(await batches.call(batches.database.batches, context.namespace)) >= gateway.settings.files_count:
            text = f"there are {gateway.settings.files_count} batches, the limit; the oldest go 30 days after their end"
            raise too_many_of_one(text)
        now, kept = batches.database.now, message.output_expires_after
        record = BatchRecord(
            id=new_id("batch_"),
            namespace=context.namespace,
            client=context.client.name,
            endpoint=message.endpoint,
            completion_window=message.completion_window,
            input_file_id=message.input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            is_local=gateway.is_of_this_machine(context),
            metadata=message.metadata,
            output_kept_s=KEPT_S if kept is None else kept.seconds,
        )
        if not await batches.call(batches.database.add_batch, record):
            raise _no_file("input_file_id", 400)
        batches.enter(record)
        return as_json(record.shown())

    @api.get("/v1/batches", responses=answer_of(BatchList))
    async def list_batches(request: Request, limit: str = USUAL_BATCHES, after: str = "") -> Response:
        batches = _batches(gateway)
        records = await batches.call(batches.database.batches, visit_of(request.scope).namespace)
        return as_json(listed([record.shown() for record in records], limit, "desc", after))

    @api.get("/v1/batches/{batch_id}", responses=answer_of(BatchBody))
    async def get_batch(request: Request, batch_id: str) -> Response:
        return as_json((await _batch(_batches(gateway), request, batch_id)).shown())

    @api.post("/v1/batches/{batch_id}/cancel", responses=answer_of(BatchBody))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        batches = _batches(gateway)
        record = await _batch(batches, request, batch_id)
        if record.has_ended or record.status == "finalizing":
            text = f"the batch is {record.status}; one that is validating or in_progress can be cancelled"
            raise GatewayError(409, text, "batch_id", "invalid_status")
        return as_json((await batches.cancel(record)).shown())


def _add_file_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/files", openapi_extra=UPLOAD, responses=answer_of(FileBody))
    async def create_file(request: Request) -> Response:
        batches, settings, context = _batches(gateway), gateway.settings, visit_of(request.scope)
        database = batches.database
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:18]) > settings.max_file_bytes + FORM_BYTES:
            raise too_large(settings.max_file_bytes)
        count, size = await batches.call(database.use, context.namespace)
        if count >= settings.files_count or size >= settings.files_bytes:
            most, most_bytes = settings.files_count, settings.files_bytes
            text = f"there are {count} files of {size} bytes, the limits are {most} and {most_bytes}; delete some"
            raise too_many_of_one(text)
        record = await batches.call(database.begin_file, context.namespace, "", "batch")

        async def keep(lines: list[bytes]) -> None:
            await batches.call(database.add_lines, record, lines)
            if record.num_bytes > settings.max_file_bytes:
                raise too_large(settings.max_file_bytes)
            _, size = await batches.call(database.use, context.namespace)  # others may come in at the same time
            if size > settings.files_bytes:
                text = f"with this file there are {size} bytes, the limit is {settings.files_bytes}; delete some"
                raise too_many_of_one(text)

        incoming = Incoming(request.receive, settings.max_file_bytes + FORM_BYTES, settings.body_timeout_s)
        longest = await gateway.body_limit(settings.max_image_body_bytes)
        try:
            async with asyncio.timeout(settings.request_timeout_s):
                form = await read_form(request.headers.get("content-type", ""), incoming, longest, MOST_LINES, keep)
            record.filename, record.expires_at = form.filename or "", record.created_at + form.kept_s
            await batches.call(database.finish_file, record)
        except TimeoutError:
            text = f"the file did not arrive within {settings.request_timeout_s:g} s"
            raise GatewayError(408, text, code="timeout") from None
        finally:
            if not record.ready:
                await asyncio.shield(batches.call(database.drop_file, record))
        return as_json(record.shown())

    @api.get("/v1/files", responses=answer_of(FileList))
    async def list_files(
        request: Request, limit: str = str(MOST_FILES), order: str = "desc", after: str = "", purpose: str = ""
    ) -> Response:
        batches = _batches(gateway)
        records = await batches.call(batches.database.files, visit_of(request.scope).namespace)
        shown = [record.shown() for record in records if purpose in ("", record.purpose)]
        return as_json(listed(shown, limit, order, after, MOST_FILES))

    @api.get("/v1/files/{file_id}", responses=answer_of(FileBody))
    async def get_file(request: Request, file_id: str) -> Response:
        return as_json((await _file(_batches(gateway), visit_of(request.scope).namespace, file_id)).shown())

    @api.get("/v1/files/{file_id}/content", response_class=Response)
    async def get_content(request: Request, file_id: str) -> Response:
        batches = _batches(gateway)
        record = await _file(batches, visit_of(request.scope).namespace, file_id)
        headers = {"content-length": str(record.num_bytes), "content-disposition": "attachment"}
        return StreamingResponse(_content(batches, record), headers=headers, media_type="application/octet-stream")

    @api.delete("/v1/files/{file_id}", responses=answer_of(DeletedFile))
    async def delete_file(request: Request, file_id: str) -> Response:
        batches = _batches(gateway)
        record = await _file(batches, visit_of(request.scope).namespace, file_id)
        if (reader := await batches.call(batches.database.drop_file, record)) is not None:
            text = f"{reader} reads this file and has not ended; cancel it first"
            raise GatewayError(409, text, "file_id", "file_in_use")
        return as_json({"id": record.id, "object": "file", "deleted": True})


async def _content(batches: Batches, record: FileRecord) -> AsyncIterator[bytes]:
    last = 0
    while lines := await batches.call(batches.database.lines, record, last, SENT_BYTES):
        yield b"".join(data for _, data in lines)
        last = lines[-1][0]


def _batches(gateway: Gateway) -> Batches:
    """Raises GatewayError(404) where this server has none."""
    if gateway.batches is None:
        text = "this server keeps no files and batches; start it with --batches DIRECTORY"
        raise GatewayError(404, text, code="not_found")
    return gateway.batches


async def _file(batches: Batches, namespace: str, file_id: str) -> FileRecord:
    """Raises GatewayError(404)."""
    record = await batches.call(batches.database.file, namespace, file_id)
    if record is None:
        raise _no_file("file_id", 404)
    return record


def _no_file(param: str, status: int) -> GatewayError:
    return GatewayError(status, "there is no such file; it was deleted, or its time is over", param, "not_found")


async def _batch(batches: Batches, request: Request, batch_id: str) -> BatchRecord:
    """Raises GatewayError(404)."""
    record = await batches.call(batches.database.batch, batch_id, visit_of(request.scope).namespace)
    if record is None:
        raise GatewayError(404, "there is no such batch", "batch_id", "not_found")
    return record
