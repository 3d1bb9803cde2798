// Requests to the page's server, with the user's key, if any.

let key = sessionStorage.getItem("headstart-key") || "";

export const savedKey = () => key;

export function saveKey(text) {
  key = text;
  sessionStorage.setItem("headstart-key", key);
}

export function headers(more) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function askForKey(trouble) {
  document.getElementById("key-trouble").textContent = trouble;
  const dialog = document.getElementById("ask-key");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  saveKey(document.getElementById("key").value.trim());
}

// Returns the response. Asks for a key until the server accepts it. Throws any other error.
export async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const response = await fetch(path, { ...options, headers: headers(options.headers || {}) });
    if (response.ok) return response;
    let text = `${response.status} ${response.statusText}`;
    try {
      text = (await response.json()).error.message;
    } catch { /* the body is not JSON */ }
    if (response.status === 401) {
      if (used === key) await askForKey(used ? text : "");
      continue;
    }
    throw Object.assign(new Error(text), { status: response.status });
  }
}

export async function get(path) {
  return (await request(path)).json();
}

export async function post(path, body, signal) {
  return request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

// Yields the events of a response as parsed JSON, up to "[DONE]".
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((text) => text.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}
