"""`sliceserve bench`: puts load on an OpenAI-compatible server and measures what its users would see.

The client shares the machine with the server in most comparisons, so it is built to cost little: one asyncio loop, a C
HTTP parser, no JSON decoding of chunks in the middle of a stream. docs/performance.md says what it costs.
"""
