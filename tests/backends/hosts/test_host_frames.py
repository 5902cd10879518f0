"""Values on their way between a runner and a host."""

from __future__ import annotations

import json

import pytest

from plait.backends import Usage
from plait.backends.backend_protocol import Output
from plait.backends.hosts.host_frames import output_json, read_output


@pytest.mark.parametrize("cost", [None, 0.0, 0.5])
def test_a_cost_arrives_also_if_it_is_zero(cost: float | None) -> None:
    output = Output("text", "hi", Usage(10, 1, cost, "m"))
    assert read_output(json.loads(json.dumps(output_json(output)))) == output
