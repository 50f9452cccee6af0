"""Disaggregated prefill and decode: KV of prompts goes from prefill replicas to decode replicas.

A decode replica owns the request. Its connector (`decode_connector`) decides whether to have the prompt computed
elsewhere and runs a `Fetch` for it. At the prefill replica, `prefill_connector` collects what the engine exports in a
`Transfer` of the `TransferTable`, from which it is fetched in chunks. How bytes travel is a `KVTransport`.
"""
