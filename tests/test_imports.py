"""Imports go one way: a package knows only lower levels, or its own without cycles."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tlora

ROOT = Path(__file__).parents[1] / "tlora"

LEVELS = {
    "core": 0,
    "config": 1,
    "kernels": 1,
    "costs": 1,
    "data": 1,
    "model": 2,
    "parallel": 2,
    "schedule": 2,
    "tuning": 2,
    "store": 2,
    "training": 3,
    "control": 3,
    "runtime": 4,
    "simulation": 4,
    "server": 5,
    "cli": 6,
}
TORCH_FREE = ["core", "config", "costs", "schedule", "tuning", "store", "control", "simulation"]

PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def modules_named(tree: ast.AST, module: str) -> set[str]:
    """Absolute names of everything that a module imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base]).rstrip(".")
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def packages_named(names: set[str]) -> set[str]:
    return {
        parts[1]
        for name in names
        if (parts := name.split("."))[0] == "tlora" and len(parts) > 1 and parts[1] in PACKAGES
    }


def package_imports() -> dict[str, set[str]]:
    """Package -> the other packages that any of its modules imports."""
    imports: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.glob("*/**/*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names = modules_named(ast.parse(path.read_text()), ".".join(parts))
        imports[parts[1]] |= packages_named(names) - {parts[1]}
    return imports


def violations(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{package} imports {other}"
        for package, others in sorted(imports.items())
        for other in sorted(others)
        if LEVELS[other] > LEVELS[package]
    ]


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_package_has_a_level() -> None:
    """A package that is not on the list is not watched."""
    assert set(PACKAGES) <= set(LEVELS)


def test_packages_import_only_lower_levels_or_their_own() -> None:
    """Read from the source, so that lazy imports count."""
    assert violations(package_imports()) == []


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    """Not within a level either."""
    assert find_cycle(package_imports()) == []


def test_the_checks_refuse_what_they_should() -> None:
    """An import upward and a circle within a level are both seen, relative and lazy ones too."""
    upward = ast.parse("def f():\n    from ..training import engine")
    names = modules_named(upward, "tlora.model.pool")
    assert violations({"model": packages_named(names)}) == ["model imports training"]
    assert find_cycle({"data": {"kernels"}, "kernels": {"data"}}) != []


@pytest.mark.parametrize("package", [name for name in TORCH_FREE if name in PACKAGES])
def test_the_pure_packages_load_without_torch(package: str) -> None:
    """Every module of them, and whatever it imports in turn."""
    paths = sorted((ROOT / package).rglob("*.py"))
    modules = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]
    modules = [name.removesuffix(".__init__") for name in modules]
    code = f"import sys, {', '.join(modules)}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PROMISED = {
    "Engine",
    "JobSpec",
    "Plan",
    "RunResult",
    "Study",
    "SuperModel",
    "export_adapter",
    "load_spec",
    "multi_lora",
    "simulate",
    "train",
    "tune",
}


def test_the_names_that_are_promised_are_there() -> None:
    """`import tlora` has them all, and says so."""
    assert {name for name in PROMISED if not hasattr(tlora, name)} == set()
    assert set(tlora.__all__) >= PROMISED
