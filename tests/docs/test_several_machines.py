"""The clusters of docs/guides/several-machines.md: TLS and Slurm run on this machine, Kubernetes against its schema."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import jsonschema_rs
import pytest
import yaml

from tests.docs.documents import blocks, commands
from tests.support.hosts import sshd
from tests.support.hosts.world import PLAIT
from tests.support.polling import until
from tests.support.processes.command import Done, plait

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = "docs/guides/several-machines.md"
BLOCKS = blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"))
BIN, FAKES = Path(sys.executable).parent, ROOT / "tests" / "support" / "bin"


def shown(text: str) -> str:
    """Return the one block that contains `text`."""
    (found,) = [block.text for block in BLOCKS if text in block.text]
    return found


def line(beginning: str) -> str:
    """Return the one command line that begins so."""
    (found,) = [one.line for b in BLOCKS if b.info == "sh" for one in commands(b) if one.line.startswith(beginning)]
    return found


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The variables of a machine with the certificate and the settings that the page shows."""
    pytest.importorskip("distributed")
    subprocess.run(shlex.split(line("openssl ")), cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "etc").mkdir()
    settings = shown("# /etc/dask/tls.yaml").replace("/etc/plait/", f"{tmp_path}/")
    (tmp_path / "etc" / "tls.yaml").write_text(settings, encoding="utf-8")
    path = os.pathsep.join([str(BIN), str(FAKES), os.environ["PATH"]])
    return {"DASK_ROOT_CONFIG": str(tmp_path / "etc"), "PATH": path, "XDG_STATE_HOME": str(tmp_path / "state")}


@contextmanager
def started(folder: Path, machine: Mapping[str, str], *words: str) -> Generator[None]:
    """Run a program that ends by a signal."""
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(words, cwd=folder, env={**os.environ, **machine}, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)


def hosts(folder: Path, machine: Mapping[str, str], port: int) -> Done:
    """Run `plait doctor --hosts` with the plan of the page."""
    plan = shown("# cluster.yaml").replace("10.0.0.1:8786", f"127.0.0.1:{port}")
    (folder / "cluster.yaml").write_text(plan, encoding="utf-8")
    return plait(folder, "doctor", "--hosts", "cluster.yaml", **machine)


async def registered(folder: Path, logs: str) -> None:
    """Return once a worker has reported in its log that it is part of the cluster."""
    await until(lambda: any("Registered to:" in log.read_text() for log in folder.glob(logs)), 120)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_the_certificate_serves_scheduler_worker_and_runner(tmp_path: Path, machine: dict[str, str]) -> None:
    port = free_port()
    scheduler = [*shlex.split(line("dask scheduler").replace("10.0.0.1", "127.0.0.1")), "--port", str(port)]
    worker = shlex.split(line("dask worker").replace("10.0.0.1:8786", f"127.0.0.1:{port}"))
    with started(tmp_path, machine, *scheduler), started(tmp_path, machine, *worker):
        await registered(tmp_path, "log")
        found = hosts(tmp_path, machine, port)
        assert found.out.splitlines()[1].split()[:3] == ["fleet", "m1", "4"], found.out
        assert "TLS" not in found.out
        refused = hosts(tmp_path, {**machine, "DASK_ROOT_CONFIG": str(tmp_path / "none")}, port)
    assert (refused.code, "TLS expects a `ssl_context` argument" in refused.out) == (3, True), refused.out


async def test_jobs_of_slurm_are_workers(tmp_path: Path, machine: dict[str, str]) -> None:
    pytest.importorskip("dask_jobqueue")
    port = free_port()
    script = shown("# slurm_cluster.py").replace("8786", str(port)).replace("_jobs=3", "_jobs=1")
    script = script.replace('{"port"', '{"host": "127.0.0.1", "port"')
    (tmp_path / "slurm_cluster.py").write_text(script, encoding="utf-8")
    with started(tmp_path, machine, sys.executable, "slurm_cluster.py"):
        await registered(tmp_path, "slurm-*.out")
        found = hosts(tmp_path, machine, port)
    assert found.out.splitlines()[1].split()[:3] == ["fleet", "SLURMCluster-0", "4"], found.out


def reasons(heading: str) -> list[list[str]]:
    """Return the reasons in each row of the table below a heading."""
    _, _, section = (ROOT / PAGE).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    section = section.partition("\n#")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return [re.findall("`([^`]+)`", cell) for cell in cells]


@sshd.needs_sshd
def test_each_reason_against_a_host_is_as_the_page_says(tmp_path: Path) -> None:
    sshd.make_keys(tmp_path)
    (tmp_path / "fresh").mkdir()
    sshd.make_keys(tmp_path / "fresh")
    for name, script in (
        ("greets", f"echo Welcome\nexec {PLAIT} host"),
        ("full", f"XDG_STATE_HOME=/dev/null exec {PLAIT} host"),
        ("old", """read hello; echo '{"op": "state", "version": "0.0.1", "at_work": 0}'"""),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def reason(host: str, **changed: str) -> str:
        config = (tmp_path / "config").read_text()
        for old, new in changed.items():
            assert old in config
            config = config.replace(old, new)
        (tmp_path / "changed").write_text(config)
        plan = f"hosts: {{fleet: {{kind: ssh, ssh: [ssh, -F, changed], hosts: [{host}]}}}}\ntasks: []\n"
        (tmp_path / "fleet.yaml").write_text(plan)
        done = plait(tmp_path, "doctor", "--hosts", "fleet.yaml")
        assert done.code == 3, done.out
        return done.out

    with sshd.server(tmp_path, "m*", "127.0.0.1", port := sshd.free_port()):
        found = [
            reason("unknown.invalid"),
            reason(f"{{name: m1, plait: {PLAIT}}}", **{str(port): str(sshd.free_port())}),
            reason(f"{{name: m1, plait: {PLAIT}}}", **{"known_hosts": "none", "Checking no": "Checking yes"}),
            reason(f"{{name: m1, plait: {PLAIT}}}", **{f"{tmp_path}/user_key": f"{tmp_path}/fresh/user_key"}),
            reason("{name: m1, plait: /opt/none/plait}"),
            reason(f"{{name: m1, plait: {tmp_path}/greets}}"),
            reason(f"{{name: m1, plait: {tmp_path}/full}}"),
            reason(f"{{name: m1, plait: {tmp_path}/old}}").replace("0.0.1", "0.1.0").replace("and 0.1.0", "and 0.2.0"),
        ]
    named = reasons("### A host that cannot be used")
    for row, out in zip(named, found, strict=False):
        assert any(text in out for text in row), (row, out)
    assert named[len(found) :] == [["no answer within 30 s"]]


def test_the_variables_of_a_dask_worker_are_not_those_of_a_runner() -> None:
    units = [shown("/etc/systemd/system/plait-worker.service"), shown("/etc/systemd/system/dask-worker.service")]
    runner, dask = (re.findall("EnvironmentFile=(.+)", unit) for unit in units)
    assert (runner, dask) == (["/etc/plait/worker.env"], ["/etc/plait/dask.env"])


def closed(schema: Any) -> Any:
    """Return a schema that refuses fields that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema else {}
    return extra | {key: closed(value) for key, value in schema.items()}


def test_the_resource_for_kubernetes_is_one_of_the_operator() -> None:
    cluster = yaml.safe_load(shown("# dask-cluster.yaml"))
    definition = json.loads((ROOT / "tests" / "fixtures" / "dask-kubernetes" / "daskcluster.json").read_text())
    schema = closed(definition["schema"]["properties"]["spec"])
    assert [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(cluster["spec"])] == []


def containers() -> Mapping[str, Any]:
    spec = yaml.safe_load(shown("# dask-cluster.yaml"))["spec"]
    return {role: spec[role]["spec"] for role in ("scheduler", "worker")}


@pytest.mark.parametrize("role", containers())
async def test_the_pods_start_dask_with_its_options_and_the_certificate(role: str) -> None:
    pytest.importorskip("distributed")
    pod = containers()[role]
    (container,) = pod["containers"]
    assert container["args"][:2] == ["dask", role]
    await anyio.run_process([str(BIN / "dask"), *container["args"][1:], "--help"])
    files = {one["mountPath"] for one in container["volumeMounts"]}
    settings = yaml.safe_load(shown("# /etc/dask/tls.yaml"))["distributed"]["comm"]["tls"]
    assert files == {"/etc/dask/tls.yaml", settings["ca-file"]}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
