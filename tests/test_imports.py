"""Rules that a linter of imports can't check: what is loaded at run time, and who touches Ray's insides."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import engine

ROOT = Path(__file__).parent.parent
RAY_COMPAT = ROOT / "cluster" / "ray_compat.py"
READS_ENVIRONMENT = ROOT / "engine" / "environment.py"
PREPARES_RAY = ROOT / "cluster" / "ray_environment.py"  # Ray takes some settings only from the environment
PREPARES_LIBTPU = ROOT / "backends" / "jax" / "topology.py"  # and so does libtpu


def product_files() -> list[Path]:
    files = [path for room in ("engine", "backends", "cluster") for path in (ROOT / room).rglob("*.py")]
    return [*files, ROOT / "serve_app.py"]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module or `module.name` that a file imports, wherever in the file, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_the_engine_loads_no_ray_jax_or_torch() -> None:
    modules = ["engine", *(info.name for info in pkgutil.walk_packages(engine.__path__, "engine."))]
    code = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'ray', 'jax', 'jaxlib', 'torch'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_demo_model_s_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    """Users install no PyTorch, but tests do, so that a need for it would go unnoticed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from engine.config import EngineConfig\nfrom engine.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(EngineConfig())"
    )
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}  # no cache of converted tokenizers
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_only_ray_compat_uses_ray_s_private_apis() -> None:
    found = []
    for path in product_files():
        if path == RAY_COMPAT:
            continue
        private = [
            f"{path.relative_to(ROOT)}:{line} {name}"
            for name, line in imports(path)
            if name.split(".")[0] == "ray" and any(part.startswith("_") for part in name.split("."))
        ]
        found += private
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and ast.unparse(node).startswith(("ray.", "serve."))
        ]
    assert found == []


def test_nothing_imports_the_entry_module_and_only_tests_import_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in product_files()
        for name, line in imports(path)
        if name.split(".")[0] in ("serve_app", "torch", "tests", "bench")
    ]
    assert found == []


def test_environment_variables_are_read_in_one_place() -> None:
    found = []
    for path in product_files():
        if path in (READS_ENVIRONMENT, PREPARES_RAY, PREPARES_LIBTPU):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_every_module_says_what_lives_there() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in product_files()
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []
