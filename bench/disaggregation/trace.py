"""How much of a transfer is hidden behind the computing of later chunks: SmolLM2's prompt in four of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench.disaggregation.common import Decoder, application, ray_with_serve
from cluster.app import build_app
from cluster.kv_transfer.fetch import FetchRecord
from cluster.kv_transfer.object_store import MIB
from engine.config import EngineConfig
from engine.kv_blocks import KVFormat

SMOLLM2 = KVFormat(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def trace(folder: Path, rounds: int, file: Path | None) -> None:
    """Has SmolLM2 compute 2,048 tokens in four steps, and fetches their KV as a decode replica does."""
    options = {
        "dtype": "bfloat16",
        "max_running_seqs": 8,
        "max_model_len": 2304,
        "prefill_max_num_batched_tokens": 512,
        "disagg_topo": "1,1",
        "enable_prefix_cache_hbm": False,
        "warmup": False,  # the first fetch compiles what is needed
    }
    config = EngineConfig.from_args(options)
    with ray_with_serve(folder), application(build_app(config), "trace"):
        decoder = Decoder(config)
        records = [decoder.fetch("trace", 2048, SMOLLM2) for _ in range(rounds + 1)][1:]
    print("| run | prefill (ms) | chunks | MiB | transfer (ms, all chunks) | exposed (ms) | exposed share |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    shares = []
    for number, record in enumerate(records):
        total = sum(chunk.transfer_s for chunk in record.chunks)
        shares.append(record.exposed_s / total)
        mib = sum(chunk.num_bytes for chunk in record.chunks) / MIB
        print(
            f"| {number} | {record.compute_s * 1e3:.0f} | {len(record.chunks)} | {mib:.1f} | {total * 1e3:.1f} | "
            f"{record.exposed_s * 1e3:.1f} | {shares[-1]:.0%} |"
        )
    print(f"\nmedian exposed share: {statistics.median(shares):.0%} (target: less than 35 %)")
    if file is not None:
        file.write_text(json.dumps(_chrome_trace(records[-1]), indent=1))
        print(f"trace of the last run for chrome://tracing or Perfetto: {file}")


def _chrome_trace(record: FetchRecord) -> list[dict[str, Any]]:
    end = max(chunk.arrived_at for chunk in record.chunks)
    answered = end - record.exposed_s
    spans = [("prefill", "compute", answered - record.compute_s, answered)]
    spans += [
        (f"chunk {c.index} ({c.num_bytes / MIB:.1f} MiB)", "transfer", c.computed_at, c.arrived_at)
        for c in record.chunks
    ]
    spans.append(("exposed", "exposed", answered, end))
    rows = {"compute": 0, "transfer": 1, "exposed": 2}
    return [
        {
            "name": name,
            "cat": row,
            "ph": "X",
            "pid": 0,
            "tid": rows[row],
            "ts": begin * 1e6,
            "dur": (until - begin) * 1e6,
        }
        for name, row, begin, until in spans
    ]
