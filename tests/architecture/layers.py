"""The layers of the packages (docs/explanation/design.md) as one ordered list, and the imports that break them.

A module imports from the layers below its own, and from its own unit. Units of one layer do not import each other.
Each import counts: at the head of a module, inside a function, and for types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from tests.architecture.source import Source

# From the bottom to the top. A layer is a list of units; a unit is a package with its modules, or the modules named.
# The longest name that fits a module decides.
LAYERS: list[list[str]] = [
    # The words that every package uses.
    ["json_form", "failpoints", "clock_and_ids", "program_log"],
    ["usage", "statuses", "safe_text"],
    ["dialogue"],
    ["errors"],
    ["task"],
    ["events"],
    # The contract of a backend and its vocabulary.
    ["backends.backend_protocol backends.json_fields backends.error_kinds "
     "backends.extras backends.prices backends.whole_answer"],
    ["backends.output_schema"],
    ["backends.large_answers"],
    ["backends.running_turn backends.function_backend"],
    ["backends.process"],
    ["backends.models", "backends.frameworks", "backends.agents", "backends.command_backend"],
    ["backends.hosts"],
    ["backends.backend_specs"],
    ["backends"],  # the public names
    # The contract of a store, and the rules that each store keeps.
    ["persistence.store_protocol persistence.store_records persistence.write_rules"],
    ["persistence.tables persistence.apply_events persistence.sql_store persistence.sqlite_file"],
    ["persistence.sqlite_store persistence.store_health", "persistence.postgres_store persistence.postgres_connection"],
    ["persistence"],  # the public names
    # One run of a DAG.
    ["runner"],
    ["runner.prompts"],
    ["runner.domain"],
    ["runner.scheduling", "runner.policies", "runner.drawing", "runner.state"],
    ["runner.plan", "runner.reuse"],
    ["runner.engine"],
    ["runner.recovery"],
    ["runner.views"],
    ["runner.client"],
    ["runner.parallel_runner", "runner.plan_run"],
    ["runner.orchestrator"],
    ["runner.serving"],
    ["runner.cli"],
    ["plait hosts workflows orchestration results testing"],  # the public names
]  # fmt: skip
LEVEL = {name: level for level, units in enumerate(LAYERS) for unit in units for name in unit.split()}
UNIT = {name: unit for units in LAYERS for unit in units for name in unit.split()}
# The words, each a module of `plait`: all packages may import them, and they import each other alone.
WORDS = (
    "json_form",
    "failpoints",
    "clock_and_ids",
    "program_log",
    "usage",
    "statuses",
    "safe_text",
    "dialogue",
    "errors",
    "task",
    "events",
)
# Neither imports the other or the runner, whatever the layer.
LEAVES = ("backends", "persistence")
PUBLIC_NAMES = ("runner", "backends", "persistence")


def name_of(module: str) -> str:
    """Return the name in LAYERS that decides about `module`. Raises LookupError if there is none."""
    name = "plait" if module in {"plait", "plait.__main__"} else module.removeprefix("plait.")
    while name not in LEVEL:
        name = name.rpartition(".")[0]
    if not name or (name in PUBLIC_NAMES and f"plait.{name}" != module):
        raise LookupError(f"{module} has no layer: name it or its package in LAYERS")
    return name


def imported_modules(source: Source, known: set[str]) -> Iterator[tuple[str, int]]:
    """Yield each module in `known` that `source` imports, with the line of the import."""
    for found in source.imports:
        inner = [f"{found.module}.{name}" for name in found.names]
        targets = [module for module in inner if module in known]
        if len(targets) < len(inner) or not inner:
            targets.append(found.module)
        yield from ((target, found.line) for target in targets if target in known and target != source.module)


def breaches(sources: Iterable[Source]) -> list[str]:
    """Return each import that breaks the layers, as `file:line: name imports module`."""
    by_module = {source.module: source for source in sources}
    found: list[str] = []
    for source in by_module.values():
        name = name_of(source.module)
        for module, line in imported_modules(source, set(by_module)):
            other = name_of(module)
            home, target = name.partition(".")[0], other.partition(".")[0]
            beside = home in LEAVES and target not in {home, *WORDS}
            if beside or (UNIT[name] != UNIT[other] and LEVEL[other] >= LEVEL[name]):
                found.append(f"{source.path}:{line}: {name} imports {module}")
    return found


def import_circle(sources: Iterable[Source]) -> list[str]:
    """Return modules that import each other in a circle, as `file:line imports module`; empty if there is none."""
    by_module = {source.module: source for source in sources}
    edges = {module: dict(imported_modules(source, set(by_module))) for module, source in by_module.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        # The sorter names each module before the one that imports it.
        circle = error.args[1][::-1]
        return [f"{by_module[one].path}:{edges[one][other]} imports {other}" for one, other in pairwise(circle)]
    return []
