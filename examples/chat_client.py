"""The official OpenAI client with a SliceServe server: `pip install openai`, then `python examples/chat_client.py`."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:7080/v1", api_key="none")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers in Europe."}],
    max_tokens=100,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 40, "repetition_penalty": 1.1},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
