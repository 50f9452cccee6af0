"""What prefill and decode pools cost and bring, on this machine.

    python -m bench.disaggregation speed    # GB/s of KV from one replica to another, against copying the same bytes
    python -m bench.disaggregation trace    # SmolLM2's prompt in four chunks: how much of the transfer is hidden
    python -m bench.disaggregation tpot     # running streams while long prompts arrive: one pool against two

Real Ray and Serve on this machine. `tpot` pins the pools to different cores, and compares with one replica on the same
core as the decode pool, and with one replica that has all cores.
"""
