"""Words of docs/configuration.md that the code's models don't carry: request parameters, and differences to Hex-LLM."""

from __future__ import annotations

DESCRIPTIONS = {
    "temperature": "Randomness; 0 takes the most likely token.",
    "top_p": "Sample from the most likely tokens that together have this probability; 0 keeps one token.",
    "top_k": "Sample from this many most likely tokens; 0 and -1 turn it off.",
    "min_p": "Drop tokens less likely than this share of the most likely one's probability.",
    "repetition_penalty": "Above 1 discourages tokens of prompt and output.",
    "presence_penalty": "Subtracted once from the logits of tokens in the output.",
    "frequency_penalty": "Subtracted from a token's logit for each time it is in the output.",
    "logit_bias": "Token id to a number from -100 to 100 that is added to its logit.",
    "bad_words": "Texts that must not appear. How many are possible depends on the backend.",
    "min_tokens": "No end of sequence and no stop token before this many tokens.",
    "ignore_eos": "Go on after the end-of-sequence token, up to max_tokens.",
    "stop": "Texts that end the answer; a single text is fine.",
    "stop_token_ids": "Token ids that end the answer.",
    "include_stop_str_in_output": "Keep the stop text in the answer.",
    "skip_special_tokens": "Leave special tokens out of the answer.",
    "seed": "The same seed gives the same answer, whatever else the server does. Default: drawn per request.",
    "model": "Name of the served model; empty means that one, another is a 404.",
    "n": "Number of answers.",
    "stream": "Send tokens as they come, as server-sent events.",
    "stream_options": "`include_usage`: token counts in a last event; `continuous_usage_stats`: in every event.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens with this many alternatives; not while streaming.",
    "cache_salt": "Requests share cached prefixes only with requests of the same salt.",
    "user": "The client's own label. With `sticky_sessions`, it names the session of requests that nothing else does.",
    "safety_identifier": "The client's own label; no effect.",
    "prompt_cache_key": "The client's own label. With `sticky_sessions`, it names the request's session, unless the "
    "header `X-Session-ID` does.",
    "metadata": "The client's own labels; no effect.",
    "messages": "The conversation: roles system, developer, user, assistant; text, or parts of type text.",
    "max_tokens": "Most tokens of the answer. Default for chat: what is left of the context.",
    "max_completion_tokens": "OpenAI's newer name of max_tokens.",
    "logprobs": "Chat: true for log-probabilities. Completions: the number of alternatives, 0 for the tokens alone.",
    "top_logprobs": "Alternatives per token; needs logprobs.",
    "add_special_tokens": "Let the tokenizer add its special tokens (a chat template writes them itself).",
    "add_generation_prompt": "End the prompt with the beginning of an assistant message.",
    "continue_final_message": "Go on with the last message, which must be the assistant's.",
    "chat_template_kwargs": "More variables for the chat template.",
    "prompt": "A text or token ids, or a list of either.",
    "best_of": "Accepted if it equals n.",
    "echo": "Start the answer with the prompt; with logprobs, score it.",
    "raw_response": "The generated text alone, without `Prompt:` and `Output:` around it.",
}

HEX_LLM_NOTES = {
    "enable_prefix_cache_hbm": "On by default; turn it off with `--no-enable_prefix_cache_hbm`.",
    "enable_chunked_prefill": "On by default; turn it off with `--no-enable_chunked_prefill`.",
    "worker_distributed_method": "`mp` is accepted; workers are Ray actors either way.",
    "disagg_topo": "Works on any number of hosts, with prefix caching and chunked prefill; pools may differ in "
    "options.",
    "enable_lora": "Not available yet: refused.",
}
