// The chat: keeps the conversation, sends it, shows the answer while it streams and how fast it came.

import { renderMarkdown } from "./markdown.js";
import { ApiError, servedModel, streamChat } from "./stream.js";

const RENDER_INTERVAL_MS = 60;
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
  "seed",
];

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function addMessage(role, text) {
  $("empty").hidden = true;
  const article = element("article", `message ${role}`);
  article.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const body = element("div", "body", text);
  article.append(body);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, body };
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : [...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if (body.seed !== undefined && !Number.isSafeInteger(body.seed)) {
    throw new ApiError(`Seed: use a whole number between 0 and ${Number.MAX_SAFE_INTEGER}.`, "seed");
  }
  const stop = $("stop_strings").value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  return body;
}

class Answer {
  constructor() {
    Object.assign(this, addMessage("assistant", ""));
    this.body.classList.add("waiting");
    this.text = "";
    this.usage = null;
    this.finish = null;
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.timer = null;
  }

  push(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    this.last = performance.now();
    this.first ??= this.last;
    this.text += choice.delta.content ?? "";
    this.timer ??= setTimeout(() => this.render(), RENDER_INTERVAL_MS);
  }

  render() {
    clearTimeout(this.timer);
    this.timer = null;
    const log = $("log");
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    renderMarkdown(this.body, this.text);
    if (following) log.scrollTop = log.scrollHeight;
  }

  close(stopped) {
    this.render();
    this.body.classList.remove("waiting");
    this.article.append(element("p", "stats", this.stats(stopped)));
    $("log").scrollTop = $("log").scrollHeight;
  }

  stats(stopped) {
    const parts = [];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage;
      const seconds = (this.last - this.first) / 1000;
      parts.push(`${tokens} tokens`);
      if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
      parts.push(`TTFT ${((this.first - this.started) / 1000).toFixed(2)} s`);
      parts.push(`${details.cached_tokens} of ${prompt} prompt tokens cached`);
    } else if (this.first !== null) {
      parts.push(`TTFT ${((this.first - this.started) / 1000).toFixed(2)} s`);
    }
    if (stopped) parts.push("stopped");
    else if (this.finish === "length") parts.push("cut at max tokens");
    return parts.join(" · ");
  }
}

function showError(article, error) {
  const known = error instanceof ApiError;
  if (!known) console.error(error);
  const note = element("p", "error", known ? error.message : "Something in this page failed; the console has the details.");
  note.setAttribute("role", "alert");
  article.append(note);
  const field = known && error.param && $(error.param === "stop" ? "stop_strings" : error.param);
  if (field) {
    field.setAttribute("aria-invalid", "true");
    $("settings").open = true;
  }
  $("log").scrollTop = $("log").scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").disabled = controller === null;
}

async function send() {
  const text = $("prompt").value;
  if (running || text.trim() === "") return;
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  $("prompt").value = "";
  messages.push({ role: "user", content: text });
  const question = addMessage("user", text);
  const answer = new Answer();
  const controller = new AbortController();
  setRunning(controller);
  $("status").textContent = "Generating …";
  try {
    await streamChat(requestBody(), controller.signal, (chunk) => answer.push(chunk));
    answer.close(false);
    $("status").textContent = answer.text;
  } catch (error) {
    answer.close(controller.signal.aborted);
    if (!controller.signal.aborted) showError(answer.article, error);
    $("status").textContent = "";
  }
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
  } else {
    messages.pop();
    question.article.classList.add("unanswered");
  }
  if (running === controller) setRunning(null);
  $("prompt").focus();
}

function newChat() {
  running?.abort();
  setRunning(null);
  messages.length = 0;
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  $("prompt").focus();
}

async function showModel() {
  try {
    const model = await servedModel();
    $("model").textContent = model.id;
    $("model").title = `The served model; ${model.max_model_len} tokens of context`;
  } catch (error) {
    $("model").textContent = error.message;
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", newChat);
if (matchMedia("(max-width: 52rem)").matches) $("settings").open = false;
showModel();
