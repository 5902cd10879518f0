"""The mutants: small changes to the modules that decide, made by mutmut's operators.

A mutant is named by its module, its function and the changed text, so that its name survives edits elsewhere in the
module. Text for people (a string with a space in it) is not changed: its wording is no behaviour.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider
from mutmut.mutation.file_mutation import Mutation, MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutants"
"""What is kept from one call to the next."""

MODULES = (
    "src/plait/task.py",
    "persistence/store_records.py",
    "persistence/tables.py",
    "persistence/write_rules.py",
    "persistence/apply_events.py",
    "persistence/sql_store.py",
    "persistence/sqlite_file.py",
    "persistence/sqlite_store.py",
    "persistence/postgres_store.py",
    "persistence/postgres_connection.py",
    "runner/domain/continuation.py",
    "runner/scheduling/scheduler.py",
    "runner/scheduling/slots.py",
    "runner/scheduling/own_limits.py",
    "runner/scheduling/account_ledger.py",
    "runner/state/budget.py",
    "runner/state/stored_run.py",
    "runner/state/run_state.py",
    "runner/reuse/answer_keys.py",
    "runner/reuse/earlier_answers.py",
    "runner/engine/checkpointer.py",
    "runner/engine/growth.py",
    "runner/engine/lease.py",
    "runner/engine/attempt.py",
    "runner/engine/answer_check.py",
    "runner/engine/outcomes.py",
    "runner/engine/retries.py",
    "runner/recovery/resume.py",
    "runner/recovery/resume_plan.py",
    "runner/client/answer_task.py",
    "runner/client/offered_plans.py",
    "runner/client/run_worker.py",
    "runner/serving/http_guard.py",
    "backends/error_kinds.py",
    "backends/whole_answer.py",
    "backends/agents/agent_output.py",
    "backends/agents/acp_machine.py",
    "backends/agents/claude_code.py",
    "backends/hosts/host_connection.py",
    "backends/hosts/host_session.py",
    "backends/hosts/host_process.py",
    "backends/hosts/host_backend.py",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one module."""

    module: str
    function: str
    """The qualified name of the changed function or method, "" outside functions."""
    before: str
    after: str
    number: int
    """Counts equal changes within the function, from 1."""
    lines: range
    """The lines of the changed expression or statement."""
    in_body: bool
    """Whether the change is inside the body of a function: then the code of the function can be exchanged alone."""
    basis: str
    """A hash of the function, or of the module where there is none: a result holds until it changes."""

    @property
    def key(self) -> str:
        number = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module}::{self.function}: {self.before} => {self.after}{number}"


def drawn(mutants: Iterable[Mutant], seed: int, sample: int) -> list[Mutant]:
    """Return `sample` of the mutants, in the order of the tree. An edit of a module redraws only its own mutants."""
    ranked = sorted(mutants, key=lambda mutant: _hash(f"{seed} {mutant.key}"))[:sample]
    return sorted(ranked, key=lambda mutant: (MODULES.index(mutant.module), mutant.lines.start, mutant.key))


def mutants_of(module: str) -> list[Mutant]:
    """Return all mutants of the module, in the order of its text. To look for them takes seconds, so they are kept."""
    stored = FOLDER / f"{_hash((ROOT / module).read_text() + Path(__file__).read_text())}.pickle"
    if not stored.exists():
        FOLDER.mkdir(exist_ok=True)
        stored.write_bytes(pickle.dumps(list(_tree(module).mutants)))
    mutants: list[Mutant] = pickle.loads(stored.read_bytes())
    return mutants


def mutated_source(mutant: Mutant) -> str:
    """Return the text of the mutant's module with the change. Raises KeyError if the module has no such mutant."""
    tree = _tree(mutant.module)
    mutation = tree.mutants[mutant]
    changed: Any = tree.wrapper.module.deep_replace(mutation.original_node, mutation.mutated_node)
    return changed.code


def _shorter_strings(node: cst.BaseString) -> Iterable[cst.BaseString]:
    text = isinstance(node, cst.SimpleString) and " " in node.value
    return () if text else operator_string(node)


_OPERATORS: list[tuple[type, Any]] = [
    (kind, _shorter_strings if operator is operator_string else operator) for kind, operator in mutation_operators
]


class _Visitor(MutationVisitor):
    """mutmut's visitor, into decorated functions too, which mutmut leaves out only for its way to run mutants; but not
    into type variables, names of types and the types of casts, which nothing reads while the program runs.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._types: list[cst.Arg] = []

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        annotation = node.annotation.annotation if isinstance(node, cst.AnnAssign) else None
        if isinstance(annotation, cst.Name) and annotation.value == "TypeAlias":
            return True
        if isinstance(node, cst.Assign) and _called(node.value) in {"TypeVar", "TypeVarTuple", "ParamSpec"}:
            return True
        if isinstance(node, cst.Call) and _called(node) == "cast":
            self._types.append(node.args[0])
        if any(node is cast_to for cast_to in self._types):
            return True
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)


def _called(node: cst.BaseExpression) -> str | None:
    """Return the name of the called function, or None for anything else than such a call."""
    return node.func.value if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) else None


class _Tree:
    """A parsed module with its mutants."""

    def __init__(self, module: str) -> None:
        self.wrapper = MetadataWrapper(cst.parse_module((ROOT / module).read_text(encoding="utf-8")))
        self._module = module
        self._places = self.wrapper.resolve(PositionProvider)
        self._names: Mapping[cst.CSTNode, Any] = self.wrapper.resolve(QualifiedNameProvider)
        self._bases: dict[cst.CSTNode, str] = {}
        self._seen: Counter[tuple[str, str, str]] = Counter()
        visitor = _Visitor(_OPERATORS, IgnoredCode(set(), set(), set()))
        self.wrapper.visit(visitor)
        every = {self._mutant(mutation): mutation for mutation in visitor.mutations}
        self.mutants = {
            mutant: mutation for mutant, mutation in every.items() if not _of_strict(mutant) and not _of_a_cast(mutant)
        }

    def _mutant(self, mutation: Mutation) -> Mutant:
        owner: cst.CSTNode = mutation.contained_by_top_level_function or self.wrapper.module
        if owner not in self._bases:
            self._bases[owner] = _hash(self._code(owner))
        name, first = "", 0
        if isinstance(owner, cst.FunctionDef):
            names = self._names[owner]
            name = next(iter(names() if callable(names) else names)).name
            first = self._places[owner.body].start.line
        change = name, self._code(mutation.original_node), self._code(mutation.mutated_node)
        self._seen[change] += 1
        place = self._places[mutation.original_node]
        lines = range(place.start.line, place.end.line + 1)
        in_body = bool(name) and lines.start >= first
        return Mutant(self._module, *change, self._seen[change], lines, in_body, self._bases[owner])

    def _code(self, node: cst.CSTNode) -> str:
        return " ".join(self.wrapper.module.code_for_node(node).split())


_tree = cache(_Tree)


def _of_strict(mutant: Mutant) -> bool:
    """Return whether only a `strict` of `zip` is changed: it asserts what holds, and decides nothing."""
    before, after = (re.sub(r",? *(?:strict=\w+)? *\)$", ")", text) for text in (mutant.before, mutant.after))
    return "strict=" in mutant.before and before == after


def _of_a_cast(mutant: Mutant) -> bool:
    """Return whether only the type of a `cast` is changed."""
    before, after = (re.sub(r"^cast\((?:\"[^\"]*\"|[^,]*),", "cast(", text) for text in (mutant.before, mutant.after))
    return mutant.before.startswith("cast(") and before == after


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
