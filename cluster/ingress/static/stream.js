// The API as the page needs it: one streamed chat completion, errors as sentences.

export class ApiError extends Error {
  constructor(message, param = null) {
    super(message);
    this.param = param;
  }
}

const UNREACHABLE = "The server can't be reached. Is it still running?";

// Calls `onChunk` with every parsed chunk; resolves when the stream is complete.
export async function streamChat(body, signal, onChunk) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let complete = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.param);
    onChunk(chunk);
  }
  if (!complete) throw new ApiError("The connection ended before the answer was complete.");
}

export async function servedModel() {
  const response = await request("v1/models", {});
  return (await response.json()).data[0];
}

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  const wait = response.status === 429 ? `. Try again in ${response.headers.get("Retry-After") ?? "a few"} s.` : "";
  return new ApiError(message + wait, body?.error?.param ?? null);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
