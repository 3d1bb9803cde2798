// The forms of the API reference: each sends a request, and shows the status and the answer.

import { headers, savedKey, saveKey } from "./api.js";

const keyField = document.getElementById("key");
keyField.value = savedKey();
keyField.addEventListener("change", () => saveKey(keyField.value.trim()));

async function send(form, signal) {
  const { path, body } = form.elements;
  const answer = form.querySelector("pre");
  const options = { method: form.dataset.method, signal, headers: headers({}) };
  if (body?.value.trim()) {
    options.body = body.value;
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path.value.replace(/^\/+/, ""), options); // below the page's own address
  const type = response.headers.get("content-type") || "no content";
  form.querySelector("output").textContent = `${response.status} ${response.statusText} · ${type}`;
  answer.hidden = false;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    answer.append(value);
  }
  if (type.startsWith("application/json")) answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
}

for (const form of document.querySelectorAll("form.try")) {
  const stop = form.querySelector("button.plain");
  let request = new AbortController();
  stop.addEventListener("click", () => request.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    request.abort();
    const current = request = new AbortController();
    form.querySelector("pre").replaceChildren();
    form.querySelector("output").textContent = "waiting …";
    stop.hidden = false;
    try {
      await send(form, current.signal);
    } catch (error) {
      if (current === request) form.querySelector("output").append(current.signal.aborted ? " · stopped" : ` · ${error.message}`);
    }
    if (current === request) stop.hidden = true;
  });
}
