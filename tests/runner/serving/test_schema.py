"""What /openapi.json promises, tried with all kinds of requests against a real server."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from tests.runner.serving.test_lifecycle import PLAN, created, events
from tests.support.processes.served import Served, served
from tests.support.sizes import size

pytestmark = pytest.mark.slow

RESUME = "/api/runs/{run_id}/resume"
OPERATIONS = (
    ("POST", "/api/runs"),
    ("GET", "/api/runs"),
    ("POST", "/api/runs/wake"),
    ("GET", "/api/runs/{run_id}"),
    ("POST", RESUME),
    ("POST", "/api/runs/{run_id}/pause"),
    ("POST", "/api/runs/{run_id}/tune"),
    ("POST", "/api/runs/{run_id}/cancel"),
    ("GET", "/api/runs/{run_id}/preview"),
    ("GET", "/api/runs/{run_id}/tasks/{task_id}"),
    ("POST", "/api/runs/{run_id}/tasks/{task_id}/answer"),
    ("POST", "/api/runs/{run_id}/tasks/{task_id}/retry"),
    ("POST", "/api/runs/{run_id}/tasks/{task_id}/settle"),
    ("POST", "/api/runs/{run_id}/tasks/{task_id}/continue"),
    ("GET", "/api/runs/{run_id}/events"),
    ("GET", "/api/questions"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with served(tmp_path_factory.mktemp("schema")) as server:
        yield server


@pytest.fixture(scope="module")
def run_id(server: Served) -> str:
    """A run that has ended."""
    with server.client() as client:
        run_id = created(client, PLAN, inputs={"who": "Ada"})
        events(client, run_id)
    return run_id


@pytest.fixture(scope="module")
def schema(server: Served) -> schemathesis.BaseSchema:
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


def test_every_operation_is_tried(schema: schemathesis.BaseSchema) -> None:
    published = [result.ok() for result in schema.get_all_operations()]
    assert {(one.method.upper(), one.path) for one in published} == set(OPERATIONS)


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_every_answer_is_as_published(
    operation: tuple[str, str], mode: GenerationMode, schema: schemathesis.BaseSchema, server: Served, run_id: str
) -> None:
    method, path = operation
    numbers = count()
    # What makes a plan, or answers a question, is more than a schema says.
    excluded = [CHECKS.get_one("positive_data_acceptance")] if path in {"/api/runs", RESUME} else []

    @given(schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=size(8, 25), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        # An object in a query is sent as its fields, an empty list not at all: the request is valid then.
        assume(not any(isinstance(value, dict) or value == [] for value in (case.query or {}).values()))
        if "run_id" in case.path_parameters and next(numbers) % 2:
            case.path_parameters["run_id"] = run_id
        case.call_and_validate(headers={"Authorization": f"Bearer {server.token}"}, excluded_checks=excluded)

    check()
