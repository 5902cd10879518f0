"""`plait export --otlp`: a run as a trace, sent to a real collector, complete after kills, and the same each time."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import PIPE

import pytest

from plait.clock_and_ids import span_id, trace_id
from tests.support.agents.logs import wait_for
from tests.support.collector import Collector, Received, collecting, needs_rotel, real_collector
from tests.support.processes.command import PLAIT, environment, plait
from tests.support.processes.warm import Warm

pytestmark = pytest.mark.slow

WORK = """
import anyio
from pathlib import Path

async def work(prompt):
    if prompt == "held":
        Path("held").touch()
        while not Path("go").exists():
            await anyio.sleep(0.01)
    if prompt == "fails":
        raise ValueError("not today")
    return prompt.upper()
"""
PLAN = """
name: told
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: first, prompt: quick}
  - {id: held, prompt: held, depends_on: first}
  - {id: last, prompt: "{{ held }}", depends_on: [first, held]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def sent(folder: Path, collector: Collector, *words: str, **extra: str) -> list[Received]:
    """The spans that `plait export --otlp` sends."""
    before = len(collector.spans)
    done = plait(folder, "export", "--otlp", "last", *words, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **extra)
    assert done.code == 0, done.err
    return collector.spans[before:]


def killed_in_the_middle(folder: Path) -> None:
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as process:
        wait_for((folder / "held").exists)
        process.kill()


def shape(spans: list[Received]) -> set[tuple[str, str, str | None]]:
    """The spans of the run and its tasks, by names."""
    names = {span.span_id: span.name for span in spans}
    return {
        (span.name, str(span.attributes["plait.status"]), names.get(span.parent_id or ""))
        for span in spans
        if "plait.attempt" not in span.attributes
    }


def test_a_run_is_a_tree_of_spans(folder: Path) -> None:
    (folder / "go").touch()
    run_id = plait(folder, "run", "plan.yaml", "--json").value["run_id"]
    with collecting() as collector:
        spans = sent(folder, collector)
        assert {span.trace_id for span in spans} == {trace_id(run_id)}
        root = next(span for span in spans if span.parent_id is None)
        assert (root.name, root.span_id) == ("invoke_workflow told", span_id(run_id))
        assert root.attributes["gen_ai.operation.name"] == "invoke_workflow"
        assert root.attributes["gen_ai.workflow.name"] == "told"
        last = next(span for span in spans if span.name == "task last")
        assert (last.parent_id, last.links) == (root.span_id, [span_id(run_id, "first"), span_id(run_id, "held")])
        attempts = {span.attributes["plait.task.id"]: span for span in spans if "plait.attempt" in span.attributes}
        assert attempts["last"].parent_id == last.span_id
        assert attempts["last"].span_id == span_id(run_id, "last", 1)
        assert root.start <= attempts["first"].end <= last.start <= root.end
        assert len(spans) == len({span.span_id for span in spans}) == 7
        sent(folder, collector)
        assert collector.requests[0] == collector.requests[1]


def test_a_killed_run_has_the_trace_of_a_run_without_kills_but_for_its_attempts(folder: Path) -> None:
    killed_in_the_middle(folder)
    with collecting() as collector:
        begun = sent(folder, collector)
        assert {span.name for span in begun} == {"attempt w", "task first"}
        (folder / "go").touch()
        assert plait(folder, "resume", "-q").code == 0
        after = sent(folder, collector)
        assert [span for span in after if span.span_id in {one.span_id for one in begun}] == begun
        held = [span for span in after if span.attributes.get("plait.task.id") == "held"]
        cut, again = (span for span in held if "plait.attempt" in span.attributes)
        assert (cut.attributes["plait.status"], cut.status["code"]) == ("interrupted", 2)
        assert (again.links, again.status) == ([cut.span_id], {})
        plait(folder, "run", "plan.yaml", "-q")
        assert shape(sent(folder, collector)) == shape(after)


def test_a_run_is_followed_to_its_end(folder: Path) -> None:
    killed_in_the_middle(folder)
    with collecting() as collector:
        words = [*PLAIT, "export", "--otlp", "last", "--follow"]
        here = environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        with Warm(words, cwd=folder, env=here, stderr=PIPE) as following:
            assert collector.arrived.wait(60)
            (folder / "go").touch()
            assert plait(folder, "resume", "-q").code == 0
            assert following.wait(60) == 0
        followed = list(collector.spans)
        assert sorted(sent(folder, collector), key=str) == sorted(followed, key=str)


@needs_rotel
def test_a_real_collector_takes_the_whole_trace_of_a_killed_run(folder: Path) -> None:
    killed_in_the_middle(folder)
    with real_collector(folder) as (url, received):
        words = [*PLAIT, "export", "--otlp", "last", "--follow", "--content"]
        here = environment(OTEL_EXPORTER_OTLP_ENDPOINT=url)
        # The follower is killed too, and another begins anew.
        with Warm(words, cwd=folder, env=here) as following:
            wait_for(lambda: "task first" in received.read_text())
            following.kill()
        with Warm(words, cwd=folder, env=here) as following:
            (folder / "go").touch()
            run_id = plait(folder, "resume", "--json").value["run_id"]
            assert following.wait(60) == 0
    spans = set(re.findall(r"^ +ID +: ([0-9a-f]{16})$", received.read_text(), re.MULTILINE))
    attempts = [("first", 1), ("held", 1), ("held", 2), ("last", 1)]
    tasks = ["first", "held", "last"]
    expected = {span_id(run_id), *(span_id(run_id, one) for one in tasks), *(span_id(run_id, *one) for one in attempts)}
    assert spans == expected


def test_prompts_and_answers_are_sent_only_when_asked_for(folder: Path) -> None:
    (folder / "go").touch()
    plait(folder, "run", "plan.yaml", "-q")
    with collecting() as collector:
        bare = sent(folder, collector, OTEL_SERVICE_NAME="mine", OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b,c=d")
        assert "QUICK" not in str(bare)
        assert (collector.headers[0]["x-key"], collector.headers[0]["c"]) == ("a b", "d")
        resource = collector.bodies[0]["resourceSpans"][0]["resource"]["attributes"]
        assert {"key": "service.name", "value": {"stringValue": "mine"}} in resource
        told = next(span for span in sent(folder, collector, "--content") if span.attributes.get("plait.attempt") == 1)
        assert '"content": "quick"' in told.attributes["gen_ai.input.messages"]
        assert '"content": "QUICK"' in told.attributes["gen_ai.output.messages"]


def test_a_failure_is_told_with_its_traceback(folder: Path) -> None:
    (folder / "plan.yaml").write_text(PLAN.replace("prompt: quick", "prompt: fails"))
    assert plait(folder, "run", "plan.yaml", "-q").code == 1
    with collecting() as collector:
        spans = sent(folder, collector)
        attempt, task, root = spans
        assert (attempt.attributes["error.type"], attempt.status["code"]) == ("unexpected", 2)
        assert "not today" in attempt.status["message"]
        (event,) = attempt.events
        assert event["name"] == "exception"
        assert "in work" in event["attributes"]["exception.stacktrace"]
        assert (task.status["code"], root.status["code"], root.attributes["plait.status"]) == (2, 2, "failed")


def test_a_collector_that_refuses(folder: Path) -> None:
    (folder / "go").touch()
    plait(folder, "run", "plan.yaml", "-q")
    with collecting() as collector:
        here = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        rejected = '{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'
        collector.answers = [(503, {"retry-after": "0"}, "") for _ in range(1)]
        assert plait(folder, "export", "--otlp", "last", "--json", **here).value["spans"] == 7
        collector.answers = [(401, {}, "no such key"), (200, {}, rejected)]
        done = plait(folder, "export", "--otlp", "last", **here)
        assert done.code == 2
        assert "HTTP status 401: no such key; check OTEL_EXPORTER_OTLP_ENDPOINT, and the headers in" in done.err
        done = plait(folder, "export", "--otlp", "last", **here)
        assert (done.code, "2 of 7 spans were rejected: too old" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--otlp", "r", "--to", "x.csv"], "leave --to, --task and --raw out"),
        (["r"], "name a file with --to results.csv, or send a trace with --otlp"),
        (["r", "--to", "x.csv", "--follow"], "--follow and --content belong to --otlp"),
    ],
)
def test_options_that_do_not_fit(folder: Path, words: list[str], said: str) -> None:
    done = plait(folder, "export", *words)
    assert (done.code, said in done.err) == (2, True)


def test_an_endpoint_that_cannot_be_called(folder: Path) -> None:
    (folder / "go").touch()
    plait(folder, "run", "plan.yaml", "-q")
    done = plait(folder, "export", "--otlp", "last", OTEL_EXPORTER_OTLP_ENDPOINT="localhost:4318")
    assert (done.code, "OTEL_EXPORTER_OTLP_ENDPOINT does not begin with http" in done.err) == (2, True)
