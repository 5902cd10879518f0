"""Turns with an agent that speaks the Agent Client Protocol: what `acp_talk.py` wants said is said, in both directions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from backends.child import Child
from backends.errors import BackendError
from backends.process import adopted, read_known
from backends.protocol import Files, Opening, Reply, Usage

from .acp_permits import Grant, marked, unmarked
from .acp_speech import Speech, said_in
from .acp_talk import Talk
from .acp_wire import Step, prompt_of
from .past import earlier_calls, feed
from .program import Answered, Call, Reader
from .turn import CliConversation

if TYPE_CHECKING:
    from .acp import AcpBackend
