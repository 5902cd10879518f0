"""The questions of a run that wait for a person, and the commands that answer them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import command_line
from plait.runner.cli.terminal_output import as_line, print_note
from plait.runner.client.store_place import StorePlace
from plait.runner.domain.asked_question import parse_time
from plait.runner.engine.lease import Liveness, liveness
from plait.runner.engine.run_options import LEASE_SECONDS
from plait.runner.state.stored_run import stored_run
from plait.runner.views.event_sentences import age
from plait.runner.views.read_views import waiting_tasks
from plait.runner.views.view_models import AskedView, QuestionView


def print_watch_notice(run: RunRecord) -> None:
    """Print why the command takes half a minute, if the owner of the run cannot be judged from this machine."""
    owner = run.owner
    if owner is not None and liveness(owner) is Liveness.UNKNOWN:
        print_note(
            f"process {owner.pid} on {as_line(owner.host)} owns run {run.run_id} and cannot be checked from this "
            f"machine; waiting up to {LEASE_SECONDS:g} s for a renewal of the lease"
        )


_LONGEST_VALUE = 120


def answering_command(one: QuestionView, path: StorePlace) -> str:
    """Return the command that answers, with a placeholder for the answer."""
    if one.asks is None:
        return command_line(path, "answer", one.run_id, one.task_id, "--done", "TEXT")
    schema = one.asks.schema
    wanted = "TEXT" if schema is None else "JSON" if schema else "VALUE"
    return command_line(path, "answer", one.run_id, one.task_id, wanted)


def question_facts(asks: AskedView | None) -> Iterator[tuple[str, str]]:
    """Yield further facts about a question, each with its name."""
    if asks is None:
        return
    if asks.schema is not None:
        yield "wants", as_line(describe_schema(asks.schema), _LONGEST_VALUE)
    if asks.default is not None:
        yield "default", as_line(_dump(asks.default), _LONGEST_VALUE)
    if asks.deadline_at is not None:
        yield "deadline", _format_deadline(asks, asks.deadline_at)


async def list_waiting(store: Store, run_id: str) -> list[QuestionView]:
    """Return the waiting tasks of the run, in the order of the DAG, except those whose answer is stored already. Raises
    StoreError, RunNotFound.
    """
    return await waiting_tasks(await stored_run(store, run_id))


def _format_deadline(asks: AskedView, at: str) -> str:
    left = parse_time(at) - time.time()
    if left > 0:
        return f"{at}, in {age(left)}"
    return f"{at}, passed: `plait resume` " + ("fails the task" if asks.default is None else "takes the default")


def describe_schema(schema: Mapping[str, JsonValue]) -> str:
    """Describe the values that a JSON Schema allows, in a few words."""
    allowed, kind, fields = schema.get("enum"), schema.get("type"), schema.get("properties")
    if isinstance(allowed, list) and allowed:
        return "one of " + ", ".join(map(_dump, allowed))
    if kind == "object" and isinstance(fields, dict) and fields:
        return f"an object with {', '.join(fields)}"
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        return f"a list, each {describe_schema(items)}"
    if isinstance(kind, str) and schema.keys() <= {"type", "title", "description"}:
        return kind
    return "JSON that matches " + _dump(dict(schema)) if schema else "any JSON, or text"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
