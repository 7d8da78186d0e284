// Requests to this server: the OpenAI API, and the stream of views. The key stays in this tab (sessionStorage).

import { events } from "./events.js";

const KEY = "everbatch.key";
const BASE = new URL(".", document.baseURI); // behind a proxy the page may lie below a path

export class ApiError extends Error {
  /** `status`: of HTTP; 0 where the server was not reached, or a stream broke. */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The response to a request, where it is not an error. Throws ApiError, and AbortError where `signal` says so. */
async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await reached(fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" }));
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new Event("key-wanted"));
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answers ${response.status}`, response.status);
}

/** What a promise of the network gives. Throws ApiError where the network fails. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached", 0);
  }
}

/** The models that requests may name: { name, takesPictures }. */
export async function models() {
  const response = await request("v1/models");
  return (await reached(response.json())).data.map(({ id, input_modalities: kinds }) => ({
    name: id,
    takesPictures: Boolean(kinds?.includes("image")),
  }));
}

/** Yields the chunks of a chat completion, and { waiting } while the server is started again. Throws as `request` does. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const { data, comment } of broken(events(response.body))) {
    if (comment !== undefined) {
      yield { waiting: true };
      continue;
    }
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 200);
    yield chunk;
  }
  throw new ApiError("the connection ended before the answer did", 0);
}

/** Yields { event, data }: what the engine does, `hz` times a second. Throws as `request` does. */
export async function* live(hz, signal) {
  const response = await request(`everbatch/live?hz=${hz}`, { signal });
  yield* broken(events(response.body));
}

/** The same items; a connection that breaks is an ApiError. */
async function* broken(items) {
  try {
    yield* items;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the connection to the server broke", 0);
  }
}
