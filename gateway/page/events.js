// Reads server-sent events from the body of a response. EventSource cannot be used: it sends no key, and no POST.

/** Yields { event, data } for each event and { comment } for each comment, in their order. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith(":")) {
          yield { comment: line.slice(1).trim() };
        } else {
          const [, name, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          if (name === "data") data.push(text);
          if (name === "event") event = text;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // It has ended already, or the connection has.
  }
}
