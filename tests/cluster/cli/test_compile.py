"""`sliceserve compile`: wrong command lines, and the options that it hands to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli.compile import compile_command, server_options
from cluster.cli.flags import FlagParser, add_config_flags, given
from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--topology is missing: name a slice"),
        (["--topology=v5e:3x3"], 2, "no topology 'v5e:3x3'; v5e has v5e:2x2"),
        (["--topology=inf2.48xlarge"], 2, "programs are compiled for TPUs only"),
        (["--topology=v5e:2x2", "--threads=0"], 2, "--threads=0: use a number from 1 on"),
        (["--topology=v5e:4x4", "--num_hosts=2", "--tensor_parallel_size=16"], 2, "--num_hosts=2: several hosts"),
        (["--topology=v5e:2x2", "--disagg_topo=1,1", "--prefill_block_size=16"], 2, "give --block_size in a command"),
        (["--topology=v5e:2x2", "--tensor_parallel=4"], 2, "did you mean --tensor_parallel_size?"),
        (["--topology=v5e:1x1", "--model=nobody/nothing"], 1, "no model 'nobody/nothing' here"),
    ],
)
def test_what_can_t_be_compiled_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_command(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_server_gets_the_options_that_shape_its_programs() -> None:
    config = EngineConfig.from_args({"model": "a/b", "backend": "tpu", "max_running_seqs": "32", "warmup": "true"})
    command = server_options(config, num_blocks=77, max_model_len=2048, out=Path("/shared"))
    parser = FlagParser("sliceserve serve", "")
    add_config_flags(parser)
    read = EngineConfig.from_args(given(parser.parse(command.removeprefix("sliceserve serve ").split())))
    expected = config.model_dump() | {"num_blocks": 77, "max_model_len": 2048, "compilation_cache_dir": "/shared"}
    assert read.model_dump() == expected
