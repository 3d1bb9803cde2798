// The chat: a conversation in this tab. Below each reply are its cached tokens and the saved time.

import { events, post } from "./api.js";
import { savedSeconds, seconds } from "./chart.js";
import { example } from "./example.js";
import { count, counted } from "./words.js";

export class Chat {
  constructor(elements, modelName, coldPromptsOfServer) {
    Object.assign(this, elements);
    this.modelName = modelName;
    this.coldPromptsOfServer = coldPromptsOfServer; // its result is empty without an administrator's key
    this.messages = [];
    this.number = 0; // of the current chat in this tab
    this.coldPrompts = []; // of this tab
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    this.stop.addEventListener("click", () => this.abort.abort());
    this.example.addEventListener("click", () => {
      this.message.value = example(this.messages.length / 2);
      this.message.focus();
    });
    this.newChat.addEventListener("click", () => {
      this.abort?.abort();
      this.number += 1;
      this.messages = [];
      this.turns.replaceChildren();
      this.message.focus();
    });
  }

  add(kind, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    turn.textContent = text;
    this.turns.append(turn);
    turn.scrollTop = turn.scrollHeight; // show the end of a document, where the question is
    this.turns.scrollTop = this.turns.scrollHeight;
    return turn;
  }

  get isWaiting() { return Boolean(this.abort); }

  // While a reply streams, Stop replaces Send and gets its keyboard focus.
  wait(isWaiting) {
    const [shown, hidden] = isWaiting ? [this.stop, this.submit] : [this.submit, this.stop];
    const hadFocus = document.activeElement === hidden;
    shown.hidden = false;
    hidden.hidden = true;
    if (hadFocus) shown.focus();
    this.form.dispatchEvent(new Event("waiting"));
  }

  async send() {
    const content = this.message.value;
    if (!content.trim() || this.abort) return;
    this.add("user", content);
    this.message.value = "";
    const reply = this.add("reply", "reading …");
    reply.classList.add("reading");
    const messages = [...this.messages, { role: "user", content }];
    this.abort = new AbortController();
    this.wait(true);
    const number = this.number;
    let text = "", first = null, usage = null, problem = null;
    const start = performance.now();
    try {
      const body = { model: this.modelName(), messages, stream: true,
        stream_options: { include_usage: true }, return_progress: true };
      const response = await post("v1/chat/completions", body, this.abort.signal);
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage || usage;
        if (event.prompt_progress && !text) {
          const { processed, total } = event.prompt_progress;
          reply.textContent = `reading ${count(processed)} of ${counted(total, "token")}`;
        }
        const delta = event.choices[0]?.delta?.content;
        if (!delta) continue;
        first ??= (performance.now() - start) / 1000;
        text += delta;
        reply.classList.remove("reading");
        reply.textContent = text;
        this.turns.scrollTop = this.turns.scrollHeight;
      }
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.message;
    }
    this.abort = null;
    this.wait(false);
    reply.classList.remove("reading");
    reply.textContent = text;
    if (number !== this.number) return; // the user began a new chat
    if (text) this.messages = [...messages, { role: "assistant", content: text }];
    else this.message.value ||= content; // the user may send it again
    this.showCost(reply, usage, first, problem);
    this.message.focus();
  }

  showCost(reply, usage, first, problem) {
    const cost = document.createElement("span");
    cost.className = "cost";
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      const computed = usage.prompt_tokens - cached;
      parts.push(`${count(cached)} of ${counted(usage.prompt_tokens, "prompt token")} cached`);
      if (first !== null) parts.push(`first token after ${seconds(first)}`);
      if (first !== null && computed > Math.max(64, cached)) this.coldPrompts.push({ tokens: computed, seconds: first });
      const drafts = usage.completion_tokens_details;
      if (drafts?.accepted_prediction_tokens) parts.push(`${count(drafts.accepted_prediction_tokens)} of ${counted(usage.completion_tokens, "token")} drafted`);
      const all = this.coldPromptsOfServer();
      const saved = savedSeconds(cached, all.length ? all : this.coldPrompts);
      if (saved !== null && cached > 16) parts.push(`saved about ${seconds(saved)}`);
    }
    if (problem) {
      parts.push(problem);
      if (problem !== "stopped") reply.classList.add("error");
    }
    cost.textContent = parts.join(" · ");
    reply.append(cost);
    this.turns.scrollTop = this.turns.scrollHeight;
  }
}
