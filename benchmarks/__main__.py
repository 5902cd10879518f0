"""`python -m benchmarks [--quick] [PART]`: run all benchmarks, or those of a part, and write results.json and the table
in docs/benchmarks.md. `--help` lists the parts.

Compared cases are measured in turn, in the same minutes. Figures are medians and ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.stores import CASES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


GROWTHS = {
    "once": "by one planner at once",
    "for_each": "by `for_each` over a result",
    "planners": "by 100 planners",
    "steps": "by 1,000 planners one after the other, 10 each",
}


@dataclass(frozen=True)
class Line:
    """A figure of the report."""

    what: str
    """The measured quantity."""
    figure: str
    target: str = ""
    reached: bool | None = None
    """Whether the figure reaches the target; None without a promise."""


def measure(*arguments: str) -> dict[str, float]:
    """Run `benchmarks.measure` in a new process, and return the figures. Exits if the process fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"benchmarks.measure {' '.join(arguments)} failed:\n{done.stderr}")
    print(".", end="", flush=True, file=sys.stderr)
    return json.loads(done.stdout)


def in_turn(times: int, *calls: tuple[str, ...]) -> list[dict[str, float]]:
    """Measure all calls in turn, `times` times. Return the median of each figure for each call."""
    found: list[list[dict[str, float]]] = [[] for _ in calls]
    for _ in range(times):
        for call, rows in zip(calls, found, strict=True):
            rows.append(measure(*call))
    return [{key: statistics.median(row[key] for row in rows) for key in rows[0]} for rows in found]


def shapes(times: int, results: dict[str, dict[str, float]]) -> list[str]:
    """Measure all shapes of DAGs, and add the figures to `results`. Return the table in Markdown."""
    table = [
        "| DAG | bare asyncio | prototype | plait, no store | plait, durable | prototype / bare | durable / bare "
        "| tasks/s | CPU us/task | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = [(shape, n) for shape in ("fan", "layered") for n in ("100", "1000", "10000")] + [("chain", "1000")]
    for shape, tasks in cases:
        names = ("bare", "tight", "prototype", "no_store", "durable")
        found = in_turn(times, *((name, shape, tasks) for name in names))
        results |= {f"{shape} {tasks} {name}": row for name, row in zip(names, found, strict=True)}
        bare, _, prototype, plain, durable = found
        took = " | ".join(f"{row['us_per_task']:.0f} us" for row in (bare, prototype, plain, durable))
        table.append(
            f"| {shape} {int(tasks):,} | {took} | {prototype['wall_s'] / bare['wall_s']:.1f} "
            f"| {durable['wall_s'] / bare['wall_s']:.1f} | {1e6 / durable['us_per_task']:,.0f} "
            f"| {durable['cpu_us_per_task']:.0f} | {durable['peak_mib']:.0f} |"
        )
    return table


def against(results: dict[str, dict[str, float]]) -> list[Line]:
    """Return the ratios of wall time and CPU time of durable runs of 10,000 tasks to the other cases in `results`."""

    def ratio(shape: str, other: str, figure: str = "wall_s") -> float:
        return results[f"{shape} 10000 durable"][figure] / results[f"{shape} 10000 {other}"][figure]

    most = {"fan": 5, "layered": 9}
    walls = [ratio(shape, "bare") for shape in most]
    more_cpu = max(ratio(shape, "prototype", "cpu_us_per_task") for shape in most)
    lines = [
        Line(f"{shape} of 10,000 against bare asyncio", f"{wall:.1f} times", f"within {times}", wall <= times)
        for (shape, times), wall in zip(most.items(), walls, strict=True)
    ]
    what = "CPU per task at 10,000 tasks, against the prototype's, the larger of the two"
    lines.append(Line(what, f"{more_cpu:.2f} times", "within 2", more_cpu <= 2))
    lines += [
        Line(f"{shape} of 10,000 against asyncio whose calls never wait", f"{ratio(shape, 'tight'):.1f} times")
        for shape in most
    ]
    return lines


def promises(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure all promised figures, and add the figures to `results`. Return the lines of the report."""
    small, large = in_turn(max(1, times // 2), ("durable", "layered", "1000"), ("durable", "layered", "100000"))
    resume, lag, checks, start, build = in_turn(
        times, ("resume",), ("lag",), ("checks",), ("start_up",), ("build", "100000")
    )
    spans = [in_turn(1, ("makespan", str(seed)))[0] for seed in range(1, 6)]
    worst = max(spans, key=lambda span: span["over"])
    results |= {
        "layered 100000 durable": large,
        "resume": resume,
        "lag": lag,
        "checks": checks,
        "start_up": start,
        "build": build,
    }
    results["makespan, worst of 5"] = worst
    flat = large["us_per_task"] / small["us_per_task"]
    commits = results["chain 1000 durable"]["commits"]
    return [
        *against(results),
        Line("cost per task at 100,000 tasks against 1,000", f"{flat:.2f} times", "within 1.3", flat <= 1.3),
        Line("commits of a chain of 1,000", f"{commits:.0f}", "at most 1 a task and 4 for the run", commits <= 1004),
        Line(
            "first task after `resume` of 10,000 tasks with 9,000 done",
            f"{resume['first_task_s']:.2f} s",
            "within 0.5 s",
            resume["first_task_s"] <= 0.5,
        ),
        Line(
            "event-loop lag p99, 200 tasks checkpointing", f"{lag['p99_ms']:.1f} ms", "under 10 ms", lag["p99_ms"] < 10
        ),
        Line(
            "greatest event-loop lag, 64 answers of 1 MB checked against a schema",
            f"{checks['max_ms']:.0f} ms",
            "under 50 ms",
            checks["max_ms"] < 50,
        ),
        Line(
            "makespan beyond one task over max(critical path, work / 16), worst of 5 graphs",
            f"{(worst['over'] - 1) * 100:+.1f} %",
            "within 5 %",
            worst["over"] <= 1.05,
        ),
        Line("100,000 tasks with 3 dependencies: built and checked", f"{build['wall_s']:.2f} s", "seconds"),
        *growth(times, results),
        *agents(times, results),
        *stores(times, results),
        *hosts(times, results),
        *like(times, results),
        *wire(times, results),
        *widths(times, results),
        Line("`plait --help`", f"{start['wall_s']:.2f} s", "within 0.3 s", start["wall_s"] <= 0.3),
    ]


def growth(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure the cost of a policy, and of growing runs against the same tasks declared at once."""
    led, plain = in_turn(times, ("led", "1000", "led"), ("led", "1000", "plain"))
    results |= {"led by a policy 1000": led, "led by none 1000": plain}
    decision = (led["us_per_task"] - plain["us_per_task"]) / 1e3
    what = "cost of a policy's decision for each task, in a run of 1,000"
    lines = [Line(what, f"{decision:.2f} ms", "under 1 ms", decision < 1)]
    for shape, how in GROWTHS.items():
        declared, grown = in_turn(times, ("declared", shape, "10000"), ("grown", shape, "10000"))
        results |= {f"{shape} 10000 declared": declared, f"{shape} 10000 grown": grown}
        ratio = grown["wall_s"] / declared["wall_s"]
        what = f"growing to 10,000 tasks {how}, against declaring them"
        lines.append(Line(what, f"{ratio:.2f} times", "within 1.5", ratio <= 1.5))
    return lines


def agents(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure the cost for plait of agents run as commands."""
    turn, idle, talk = in_turn(times, ("agent_turns",), ("idle_agents",), ("talkative_agent",))
    results |= {"agent turns": turn, "idle agents 100": idle, "talkative agent": talk}
    each, together = turn["cpu_ms"], turn["together_cpu_ms"]
    more = talk["more_mib"]
    return [
        Line("plait's own CPU for an agent's turn", f"{each:.1f} ms", "under 30 ms", each < 30),
        Line("the same, 20 of them at a time", f"{together:.1f} ms", "under 30 ms", together < 30),
        Line("100 agents that say nothing", f"{idle['percent']:.2f} % of a core", "under 1 %", idle["percent"] < 1),
        Line("memory to read an agent that prints 1 GB", f"{more:.1f} MiB", "under 50 MB", more * 2**20 < 50e6),
    ]


def stores(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure runs on PostgreSQL against the same runs on SQLite."""
    lines: list[Line] = []
    single = 1.0
    for number, case in enumerate(CASES):
        found = results[f"PostgreSQL, {case.name}"] = measure("stores", str(number), str(times))
        ratio, least = found["ratio"], case.to_reach
        what = f"tasks/s on PostgreSQL against SQLite, {case.name}"
        lines.append(Line(what, f"{ratio:.2f} times", f"at least {least:.2f}", ratio >= least))
        if case.tasks >= 10_000:
            single = min(single, found["one_round_trip"])
    what = "batches on PostgreSQL that are one round trip, runs of 10,000"
    return [*lines, Line(what, f"{single:.1%}", "at least 95 %", single >= 0.95)]


def hosts(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure attempts on a host against the same attempts in this process."""
    there, here = in_turn(times, ("placed", "fan", "2000", "host"), ("placed", "fan", "2000", "here"))
    results |= {"placed on a host, fan 2000": there, "the same here": here}
    least = here["cpu_ms_per_task"]
    more = there["cpu_ms_per_task"] - least
    what = "CPU of runner and host for an attempt over a connection that answers at once, beyond the same attempt here"
    ours, bare = in_turn(times, ("dask", "fan", "200", "attempts"), ("dask", "fan", "200", "submit"))
    results |= {"attempts on Dask, fan 200": ours, "bare client.submit": bare}
    cpu, submit = ours["cpu_ms_per_task"], bare["cpu_ms_per_task"]
    dask = "CPU of all processes for an attempt on Dask that answers at once"
    return [
        Line(what, f"{more:.2f} ms, {more / least:.1f} times the attempt here", "under 0.5 ms", more < 0.5),
        Line(dask, f"{cpu:.1f} ms (a bare `client.submit`: {submit:.1f} ms)", "under 6 ms", cpu < 6),
    ]


def like(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure a run with `--like` over 10,000 rows of which 10 changed, against a resume with 10 tasks left."""
    found = results["like, 10000 rows, 10 changed"] = measure("like", "10000", str(times))
    ratio, grown = found["ratio"], found["grown"]
    return [
        Line(
            "`run --like` of 10,000 tasks of which 10 changed, process start to first call, against `resume`",
            f"{ratio:.2f} times",
            "within 1.5",
            ratio <= 1.5,
        ),
        Line("growth of the store by that run, of the first run's size", f"{grown:.1%}"),
    ]


def wire(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure streamed calls to a model's API through plait, and with the least code on aiohttp."""

    def compared(shape: str, count: str, slots: str, seconds: str) -> list[dict[str, float]]:
        found = in_turn(times, *(("calls", client, shape, count, slots, seconds) for client in ("plait", "bare")))
        for client, row in zip(("plait", "aiohttp"), found, strict=True):
            results[f"calls {shape} {count} of {seconds} s, {slots} at once, {client}"] = row
        return found

    ours, bare = compared("fan", "1000", "64", "0.05")
    cpu, busy = ours["cpu_us_per_task"] / bare["cpu_us_per_task"], ours["busy"] / bare["busy"]
    longer, longer_bare = compared("fan", "1000", "64", "0.25")
    longer_busy = longer["busy"] / longer_bare["busy"]
    mixed, mixed_bare = compared("fan", "2000", "64", "0.125-0.375")
    mixed_busy = mixed["busy"] / mixed_bare["busy"]
    wide, wide_bare = compared("layered", "5000", "256", "0.2")
    wide_busy = wide["busy"] / wide_bare["busy"]
    chain, chain_bare = compared("chain", "200", "1", "0.005")
    beyond = (chain["wall_s"] - chain_bare["wall_s"]) * 1000 / 200
    opened = ours["connections"]
    lines = [
        Line("CPU of a streamed call, SQLite included, against bare aiohttp", f"{cpu:.2f} times", "within 2", cpu <= 2),
        Line("busy share of 64 slots of 50 ms, against bare aiohttp", f"{busy:.1%}", "at least 97 %", busy >= 0.97),
        Line("the same for slots of 250 ms", f"{longer_busy:.1%}", "at least 97 %", longer_busy >= 0.97),
        Line("the same for answers of 125 to 375 ms", f"{mixed_busy:.1%}", "at least 97 %", mixed_busy >= 0.97),
        Line(
            "busy share of 256 slots of 200 ms, 5,000 calls in layers of 500, against bare aiohttp",
            f"{wide_busy:.1%}",
            "at least 97 %",
            wide_busy >= 0.97,
        ),
        Line(
            "chain of 200 calls of 5 ms, time of a call beyond bare aiohttp",
            f"{beyond:.2f} ms",
            "at most 2 ms",
            beyond <= 2,
        ),
        Line("connections for 1,000 calls, 64 at once", f"{opened:.0f}", "at most 64", opened <= 64),
    ]
    lines += rated(times, results)
    lines += refused(times, results)
    if all(map(find_spec, ("langgraph", "langchain_openai"))):
        ours, graph = in_turn(
            times, *(("calls", client, "fan", "1000", "64", "0.05") for client in ("plait", "langgraph"))
        )
        results |= {"calls fan 1000, beside langgraph, plait": ours, "calls fan 1000, langgraph": graph}
        share = ours["cpu_us_per_task"] / graph["cpu_us_per_task"]
        what = "CPU of a streamed call, SQLite included, against LangGraph with ChatOpenAI and a SQLite saver"
        lines.append(Line(what, f"{share:.3f} times", "at most 0.125", share <= 0.125))
    if find_spec("openai") is not None:
        one, sdk = in_turn(times, ("one_call", "plait"), ("one_call", "sdk"))
        results |= {"import and one call, plait": one, "import and one call, openai SDK": sdk}
        start = one["wall_s"] / sdk["wall_s"]
        what = "import and one call, a whole process, against the openai SDK"
        lines.append(Line(what, f"{start:.2f} times", "within 0.35", start <= 0.35))
    return lines


def rated(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure calls against a server with a token bucket at 60 % of the demand, which holds a minute's or a second's
    refill.
    """
    lines: list[Line] = []
    for capacity, held in (("60", "a minute's"), ("1", "a second's")):
        (found,) = in_turn(min(times, 3), ("rated", "limited", "320", "16", "0.5", capacity))
        results[f"calls limited to 60 % of the demand, bucket of {held} refill"] = found
        refused, used = found["refused_share"], found["used"]
        what = f"calls refused with 429 by a bucket at 60 % of the demand that holds {held} refill"
        lines.append(Line(what, f"{refused:.1%}", "under 1 %", refused < 0.01))
        lines.append(
            Line(f"allowance used of the bucket that holds {held} refill", f"{used:.1%}", "over 95 %", used > 0.95)
        )
    return lines


def refused(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure calls against servers with a limit that nobody states beforehand."""
    (ours,) = in_turn(min(times, 3), ("refused", "plait", "600", "64", "0.3-0.5", "1200", "40"))
    results["600 calls, 64 at once, unstated bucket of 1,200 a minute"] = ours
    ideal = (600 - 40) / 20
    where = "600 calls of 0.3 to 0.5 s, 64 at once, a bucket of 1,200 a minute that plait is not told"
    slower = ours["wall_s"] / ideal
    lines = [
        Line(f"{where}: time against the bucket's ideal", f"{slower:.2f} times", "within 1.1", slower <= 1.1),
        Line(f"{where}: refusals", f"{ours['refused']:.0f}", "at most 100", ours["refused"] <= 100),
    ]
    if find_spec("openai") is not None:
        jobs = (("refused", client, "500", "32", "0.2-0.4", "0.08") for client in ("plait", "sdk"))
        ours, sdk = in_turn(min(times, 3), *jobs)
        results |= {"500 calls, 8 % refused at random, plait": ours, "500 calls, 8 % refused, openai SDK": sdk}
        share = ours["wall_s"] / sdk["wall_s"]
        what = (
            "500 calls of 0.2 to 0.4 s, 32 at once, 8 % refused at random with `Retry-After: 1`, against the openai SDK"
        )
        lines.append(Line(what, f"{share:.2f} times", "within 1.2", share <= 1.2))
    return lines


SERVERS = {
    "64 slots of 0.3 to 0.5 s": (("64", "128"), ("1000", "64", "0.3-0.5")),
    "8 slots of 0.1 to 0.2 s": (("8", "16"), ("1000", "8", "0.1-0.2")),
    "a bucket of 1,200 a minute": (("20", "64"), ("1000", "256", "0.3-0.5", "1200", "40")),
    "64 slots of 0.3 to 0.5 s, 8 % refused at random": (("64", "128"), ("1000", "64", "0.3-0.5", "0.08")),
}
"""Servers of which plait is told nothing: the widths that may be the best, and the arguments of `wire.width`."""


def widths(times: int, results: dict[str, dict[str, float]]) -> list[Line]:
    """Measure runs whose width finds itself against the best fixed width."""
    lines: list[Line] = []
    for server, (fixed, job) in SERVERS.items():
        found = in_turn(min(times, 3), *(("width", at_once, *job) for at_once in ("auto", *fixed)))
        results |= {f"1000 calls, {server}, {at} at once": row for at, row in zip(("auto", *fixed), found, strict=True)}
        ratio = found[0]["wall_s"] / min(row["wall_s"] for row in found[1:])
        what = f"1,000 calls, {server}: `concurrency: auto` against the best fixed width"
        lines.append(Line(what, f"{ratio:.2f} times", "at most 1.15", ratio <= 1.15))
    return lines


def row_of(line: Line) -> str:
    """Return the line as a table row."""
    marks = {True: "yes", False: "**no**", None: ""}
    return f"| {line.what} | {line.figure} | {line.target} | {marks[line.reached]} |"


def renew(lines: list[Line]) -> str:
    """Return the page with `lines` in place of the rows of the same quantities."""
    head, tail = PAGE.read_text().split(END)
    kept = [row for row in head.rstrip().split("\n") if not any(row.startswith(f"| {line.what} |") for line in lines)]
    return "\n".join([*kept, *map(row_of, lines), "", END]) + tail


def page(table: list[str], lines: list[Line], times: int) -> str:
    """Return the generated part of the page."""
    facts = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"{platform.system()}; medians of {times} runs; load average at the end {os.getloadavg()[0]:.1f}."
    )
    rows = list(map(row_of, lines))
    return "\n".join(
        [BEGIN, "", facts, "", *table, "", "| | measured | to reach | reached |", "|---|---|---|---|", *rows, "", END]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run all benchmarks, or those of a part.")
    parser.add_argument("--quick", action="store_true", help="measure once instead of five times")
    part = parser.add_mutually_exclusive_group()
    for measured in (growth, agents, stores, hosts, wire, widths, like):
        what = (measured.__doc__ or "").partition("\n")[0]
        part.add_argument(f"--{measured.__name__}", dest="part", action="store_const", const=measured, help=what)
    return parser.parse_args()


def main() -> None:
    options = _options()
    times = 1 if options.quick else 5
    results: dict[str, dict[str, float]] = {}
    if options.part is not None:
        lines = options.part(times, results)
        kept = json.loads(RESULTS.read_text())
        others = [one for one in kept["promises"] if one["what"] not in {line.what for line in lines}]
        kept = {"figures": kept["figures"] | results, "promises": [*others, *map(vars, lines)]}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(renew(lines))
        return
    table = shapes(times, results)
    lines = promises(times, results)
    print(file=sys.stderr)
    RESULTS.write_text(json.dumps({"figures": results, "promises": [vars(line) for line in lines]}, indent=1) + "\n")
    old = PAGE.read_text()
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    PAGE.write_text(before + page(table, lines, times) + after)
    print(page(table, lines, times))


if __name__ == "__main__":
    main()
