"""An agent of pydantic-ai as a backend: any model of the library, tools, and MCP servers, without a coding agent."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import uuid4

from anyio import CancelScope
from anyio.to_thread import run_sync

from plait.backends.backend_protocol import Conversation, ConversationRequest, DetachedTurn, Files, Output, Reply
from plait.backends.error_kinds import NO_REASON, announced_wait, kind_of, read_error
from plait.backends.extras import require
from plait.backends.function_backend import format_traceback, place_of
from plait.backends.json_fields import counted, describe_tool_call
from plait.backends.large_answers import read_answer
from plait.backends.output_schema import Schema, fitting_answer, in_words
from plait.backends.prices import Billing
from plait.backends.process.child_process import KILL_LIMIT, WATCHDOG, child_environment, scratch
from plait.backends.process.files_and_locks import private_folder, replace_file
from plait.backends.process.process_table import PREFIX, ProcessTag, kill_tree, members, offer_to_oom_killer
from plait.backends.running_turn import cancel_requested, end_of_turn
from plait.backends.whole_answer import split_thoughts, whole_answer, without_calls
from plait.dialogue import Message
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import clean_text, one_line, parse_json, shown, without_secrets
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from pydantic_ai.agent import AbstractAgent
    from pydantic_ai.messages import ModelMessage


class PydanticAIBackend:
    """Runs a pydantic-ai `agent` as a conversation: each prompt is one run of the agent, on the history so far.

    `deps` is passed to every run. The reply's `text` is the agent's output; another type than text becomes `data`, and
    `text` its JSON. With an output schema, an agent whose output is text gets it as output type, any other keeps its
    own; the value has to fit the schema, and one repair turn is made.

    If the store keeps files, an interrupted turn goes on from the last finished step: only the tools of that step are
    called twice. Otherwise the history is the stored text, and an interrupted turn starts over.

    plait retries: the model's SDK does not, where pydantic-ai can switch that off (not for Bedrock and Mistral).
    Cancellation ends the request and the MCP servers of the conversation; when the run is being cancelled, a turn stops
    between two steps.
    """

    can_fork: ClassVar[bool] = True
    account: str | None = None
    """None: the key and the model of an agent of one's own cannot be compared."""
    max_tokens: int | None = None
    """Limit of one answer, in tokens; None if unknown."""
    billing = Billing(estimates=True)
    """The facts that decide the price: pydantic-ai estimates a cost from its list where no server reports one."""
    _servers: Sequence[McpServer] = ()

    def __init__(self, agent: AbstractAgent[Any, Any], *, deps: Any = None) -> None:
        if isinstance(agent, type) or not hasattr(agent, "iter"):
            raise TypeError(f"PydanticAIBackend takes a pydantic_ai.Agent, not {agent!r:.80}")
        self._agent: Any = agent
        self._deps = deps

    def new_session_id(self) -> str | None:
        """Return a random id, under which the history is kept."""
        return uuid4().hex

    def inspect(self, files: Files) -> DetachedTurn | None:  # noqa: ARG002
        """Return None: a turn never outlives the process. With this method the runner gives the conversation files."""
        return None

    def check(self) -> None:
        """Raise BackendUnavailable if the extra, an MCP server's command or an environment variable is missing. Needs
        no network. The model's own key is checked when the first conversation is opened.
        """
        require("pydantic_ai", "pydantic-ai")
        for server in self._servers:
            server.check()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation, and start the MCP servers of a plan for it. Raises BackendUnavailable if a package, a
        key or a command is missing, or a server does not start.
        """
        self.check()
        ends = end_of_turn(request)
        agent = await self._made()
        async with running(self._servers) as toolsets, _running_agent(agent):
            yield PydanticAIConversation(agent, toolsets, self._deps, request, ends)

    async def _made(self) -> Any:
        return self._agent


class DeclaredAgentBackend(PydanticAIBackend):
    """Runs a plan's agent, made when first used: importing pydantic-ai takes a second.

    `model` is named as by pydantic-ai, `provider:model`, and backends with the same one share its rate limits.
    `instructions` are part of every request. The model may call the functions `tools`, whose signatures and docstrings
    describe them, and the `servers`, started anew for each conversation. `max_tokens` is None for the default of the
    library or the provider.
    """

    def __init__(
        self,
        model: str,
        instructions: str | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        servers: Sequence[McpServer] = (),
        max_tokens: int | None = None,
    ) -> None:
        self.account = f"pydantic-ai {model}"
        self.max_tokens = max_tokens
        self.billing = Billing(model=model.partition(":")[2], estimates=True)
        self._servers = servers
        self._model = model
        self._instructions = instructions
        self._tools = tools
        self._agent: Any = None
        self._deps = None
        self._lock = threading.Lock()

    async def _made(self) -> Any:
        return self._agent or await run_sync(self._make, abandon_on_cancel=True)

    def _make(self) -> Any:
        with self._lock:  # the import takes seconds, and is made once
            if self._agent is None:
                from pydantic_ai import Agent  # noqa: PLC0415
                from pydantic_ai.models import infer_model  # noqa: PLC0415
                from pydantic_ai.settings import ModelSettings  # noqa: PLC0415

                limit = None if self.max_tokens is None else ModelSettings(max_tokens=self.max_tokens)
                try:
                    model = infer_model(self._model)
                    self._agent = Agent(model, instructions=self._instructions, tools=self._tools, model_settings=limit)
                except Exception as error:  # a missing key or provider's package, or a tool that cannot be described
                    text = f"cannot make the agent of model {self._model}: {masked_line(str(error), 600)}"
                    raise BackendUnavailable(text) from error
            return self._agent


@asynccontextmanager
async def _running_agent(agent: Any) -> AsyncGenerator[None]:
    """Keep the agent's own MCP servers and the model's connections, until no conversation is open any more."""
    try:
        await agent.__aenter__()
    except Exception as error:  # of the agent's own servers, or of its model's connections
        raise failure_of(error) from error
    try:
        yield
    finally:
        with CancelScope(shield=True):
            await agent.__aexit__(None, None, None)


@value
class McpServer:
    """An MCP server: a command to start, or the URL of a running server."""

    name: str
    """The name in the plan. The model sees the server's tools as `<name>_<tool>`."""
    command: tuple[str, ...] = ()
    """The program and its arguments, for a server that speaks over its standard input and output."""
    url: str | None = None
    """The URL of a server that speaks HTTP."""
    cwd: Path = Path()
    """The working folder of the command."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables for the command, besides those that any program needs."""
    api_key_env: str | None = None
    """The environment variable whose value is sent to `url` as bearer token."""

    def check(self) -> None:
        """Raise BackendUnavailable if the command, or an environment variable, is missing."""
        wanted = (*self.pass_env, *([self.api_key_env] if self.api_key_env else []))
        missing = [name for name in wanted if not environ.get(name)]
        if missing:
            raise BackendUnavailable(f"MCP server {self.name!r} needs the environment variable {missing[0]}; set it")
        if self.command and shutil.which(self.program) is None:
            raise BackendUnavailable(
                f"the command {self.command[0]!r} of MCP server {self.name!r} was not found; install it, or write "
                "its path relative to the plan"
            )

    @property
    def program(self) -> str:
        """The command's program: a name on PATH, or a path relative to `cwd`."""
        program = self.command[0]
        return str(self.cwd.absolute() / Path(program).expanduser()) if "/" in program else program


# MCP servers of a plan's agent: started for a conversation, and ended with it, whole process trees included.
#
# The library starts a command with an environment of few variables and ends it in an orderly way: its input is closed,
# then it is asked to end, then it is killed. Each command is also marked, as the children of coding agents are, so that
# whatever it started ends as well: on leaving, cancellation included, and by the watchdog if this process is killed.

START_LIMIT = 30.0
"""Seconds for starting a server, or connecting to it, up to its first answer."""


@asynccontextmanager
async def running(servers: Sequence[McpServer]) -> AsyncGenerator[Sequence[Any]]:
    """Start the servers, and yield their toolsets. Leaving ends the servers.

    Raises BackendUnavailable if a command does not start, and BackendError (transient) if a URL does not answer.
    """
    if not servers:
        yield ()
        return
    await run_sync(import_module, "pydantic_ai.mcp", abandon_on_cancel=True)  # takes seconds
    with scratch() as folder:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(_running(server, folder)) for server in servers]


@asynccontextmanager
async def _running(server: McpServer, folder: Path) -> AsyncGenerator[Any]:
    from fastmcp.client.transports import StdioTransport  # noqa: PLC0415
    from pydantic_ai.mcp import MCPToolset  # noqa: PLC0415

    made = partial(MCPToolset, id=server.name, init_timeout=START_LIMIT)
    if server.url is not None:
        token = environ.get(server.api_key_env or "")
        headers = {"Authorization": f"Bearer {token}"} if token else None
        async with _connected(server, made(server.url, headers=headers)) as toolset:
            yield toolset
        return
    tag, log = ProcessTag(secrets.token_hex(8)), folder / f"{server.name}.log"
    variables = {**child_environment(server.pass_env), PREFIX + tag.marker: "1"}
    program = StdioTransport(
        server.program, list(server.command[1:]), variables, str(server.cwd), keep_alive=False, log_file=log
    )
    with suppress(OSError):  # no watchdog can be started; the server then ends when its input does
        WATCHDOG.watch(tag)
    try:
        async with _connected(server, made(program), log) as toolset:
            with suppress(OSError):  # when memory runs out, the kernel kills the server's processes before this one
                for process in await run_sync(members, (tag,)):
                    offer_to_oom_killer(process.pid)
            yield toolset
    finally:
        with CancelScope(shield=True):
            await run_sync(kill_tree, (tag,), KILL_LIMIT)
        WATCHDOG.unwatch(tag.marker)


@asynccontextmanager
async def _connected(server: McpServer, toolset: Any, log: Path | None = None) -> AsyncGenerator[Any]:
    try:
        await toolset.__aenter__()
    except Exception as error:
        raise await run_sync(_not_started, server, error, log) from error
    try:
        yield toolset.prefixed(server.name)
    finally:
        # The server may be gone by now, and the connection broken.
        with CancelScope(shield=True), suppress(Exception):
            await toolset.__aexit__(None, None, None)


def _not_started(server: McpServer, error: Exception, log: Path | None) -> Exception:
    reason = masked_line(str(error) or type(error).__name__)
    if log is None:
        return BackendError(
            ErrorKind.TRANSIENT, f"MCP server {server.name!r} at {server.url} does not answer: {reason}"
        )
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((masked_line(line) for line in reversed(lines) if line.strip()), "")
    ending = f"; its last line: {last}" if last else ""
    return BackendUnavailable(f"MCP server {server.name!r} ({server.command[0]}) did not start: {reason}{ending}")


# A conversation: one run of the agent for each prompt, on the history so far.
#
# The history is written to the session's file before each request to the model and before each call of tools. An
# attempt that resumes an interrupted turn sends no prompt: a history that ends in a request is sent, and a history that
# ends in calls of tools lets the agent call the tools.

_CONTINUES = frozenset({ErrorKind.TRANSIENT, ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED, ErrorKind.TIMEOUT,
                      ErrorKind.UNEXPECTED})  # fmt: skip
"""Kinds of errors after which the next attempt goes on from the last finished step. After others it starts over."""


class PydanticAIConversation:
    """A conversation with `agent`, which also gets `toolsets`. Without files, the history is the request's.

    A turn that still goes on at `ends`, a time of anyio's clock, fails with kind `timeout`.
    """

    def __init__(
        self,
        agent: Any,
        toolsets: Sequence[Any],
        deps: Any,
        request: ConversationRequest,
        ends: float,
    ) -> None:
        self._agent = agent
        self._toolsets = toolsets
        self._deps = deps
        self._request = request
        self.session_id = request.session_id
        self._ends = ends
        self._history = History()
        """The history so far."""
        self._has_begun = False
        """Whether a turn has begun, and `_history` is known."""
        self._noted: Sequence[ModelMessage] = ()
        """The messages before the current step, as written last."""
        self._thoughts: list[str] = []
        """The thoughts in the texts of this turn."""
        self._is_reported = False
        """Whether `on_session` was called in this turn."""

    async def send(self, prompt: str) -> Reply:
        schema = None if self._request.output_schema is None else Schema(self._request.output_schema)
        new_prompt: str | None = clean_text(prompt)
        if not self._has_begun:
            self._history, self._has_begun = await self._recalled(), True
            if self._request.resumes_interrupted and self._history.messages and self._request.files is not None:
                new_prompt = None
        if new_prompt is not None:
            self._history = _begun_after(self._history.finished)
        self._is_reported = False
        self._thoughts.clear()
        try:
            with CancelScope(deadline=self._ends):
                reply = await self._turn(new_prompt, schema)
                if not self._thoughts:
                    return reply
                message = Message("assistant", reply.text, reply.usage, "\n\n".join(self._thoughts))
                return replace(reply, messages=(Message("user", clean_text(prompt)), message))
            raise BackendError(ErrorKind.TIMEOUT, f"no answer within the task's timeout of {self._request.timeout:g} s")
        except Exception as error:
            failure = await self._failed(failure_of(error))
            if failure.messages:  # the text that came, after the prompt that it answers
                failure.messages = (Message("user", clean_text(prompt)), *failure.messages)
            raise failure from error

    async def _recalled(self) -> History:
        """Return the history to go on from. Raises BackendError (session_lost) if the history is gone."""
        request, stored = self._request, None
        source = request.session_id if request.resume else request.fork_of
        if source is not None and request.files is not None:
            stored = await run_sync(History.load, self._file_of(source, request.files))
            if stored is None and (request.resumes_interrupted or not request.history):
                what = f"the history of session {source} is no longer on this machine"
                raise BackendError(ErrorKind.SESSION_LOST, what)
        if stored is not None:
            return stored if request.resumes_interrupted else _begun_after(stored.finished)
        return _begun_after(from_stored(request.history))

    async def _turn(self, prompt: str | None, schema: Schema | None) -> Reply:
        answer = self._history.answer if prompt is None else None
        if answer is None:
            answer = await self._answered(prompt, schema)
        self._history = history = replace(self._history, answer=answer)
        usage = spent(history.messages[history.counted :])
        with CancelScope(shield=True):  # an answer that came in time is no timeout
            await self._save()
        return Reply(*answer, self.session_id, usage)

    async def _answered(self, prompt: str | None, schema: Schema | None) -> tuple[str, JsonValue]:
        output = await self._run(prompt, schema)
        if schema is None:
            text, data = stated(output)
            return whole_answer(text, (), needs_text=data is None).content, data
        run = partial(self._run, schema=schema)
        return (await fitting_answer(schema, output, _checked, run, self._request.on_output))[1]

    async def _run(self, prompt: str | None, schema: Schema | None) -> Any:
        """Run the agent once, and return the output."""
        history, options = self._history, self._options(schema)
        if prompt is not None and "output_type" not in options and schema is not None and self._is_textual:
            prompt = f"{prompt}\n\n{in_words(self._request.output_schema or {})}"
        async with self._agent.iter(prompt, message_history=list(history.messages) or None, **options) as run:
            async for node in run:
                if hasattr(node, "request"):
                    await self._note([*run.all_messages(), node.request])
                elif hasattr(node, "model_response"):
                    if thoughts := clean_parts(node.model_response):
                        self._thoughts.append(thoughts)
                    self._remember(run.all_messages())
                    check_whole(node.model_response)
                    await self._note(run.all_messages())
                else:
                    continue
                if cancel_requested():
                    what = "the agent stopped between two steps: the run is being cancelled"
                    raise BackendError(ErrorKind.UNEXPECTED, what)
                try:
                    async with node.stream(run.ctx) as events:  # sends the request, or calls the tools
                        async for event in events:
                            if (shown_event := reported(event)) is not None:
                                self._request.on_output(shown_event)
                finally:
                    self._remember(run.all_messages())
            output = run.result.output
            self._remember(run.result.all_messages())
            return output

    def _options(self, schema: Schema | None) -> dict[str, Any]:
        options: dict[str, Any] = {"deps": self._deps, "toolsets": self._toolsets}
        if settings := settings_for(self._agent.model):
            options["model_settings"] = settings
        if schema is not None and self._is_textual and (output_type := _output_type(schema)) is not None:
            options["output_type"] = output_type
        return options

    @property
    def _is_textual(self) -> bool:
        return self._agent.output_type is str

    def _remember(self, messages: Sequence[ModelMessage]) -> None:
        self._history = replace(self._history, messages=list(messages))

    async def _note(self, messages: Sequence[ModelMessage]) -> None:
        """Write the history before the next step, and report the session."""
        self._remember(messages)
        self._noted = messages
        if await self._save() and not self._is_reported and self.session_id is not None:
            self._is_reported = True
            self._request.on_session(self.session_id)

    async def _save(self) -> bool:
        """Write the history to the session's file, if there are files. Return whether it is written."""
        if self._request.files is None or self.session_id is None:
            return False
        try:
            await run_sync(self._history.save, self._file_of(self.session_id, self._request.files))
        except (OSError, ValueError) as error:
            # The paid answer counts for more than a copy of the history.
            text = f"the history cannot be written; the stored text is used instead: {masked_line(str(error), 200)}"
            self._request.on_output(Output("notice", text))
            return False
        return True

    @staticmethod
    def _file_of(session_id: str, files: Files) -> Path:
        # The form of name that `plait gc` knows: see agents/cli_agent.py.
        name = hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()[:32]
        return files.sessions / f"pydantic-ai-{name}.json"

    async def _failed(self, failure: BackendError) -> BackendError:
        """Complete the error of the turn with its usage, and with whether the next attempt goes on from here."""
        history = self._history
        failure.usage = spent(history.messages[history.counted :])
        if self._is_reported and failure.kind in _CONTINUES:
            # What the failed step left, such as half an answer, is no place to go on from.
            self._history = replace(history, messages=self._noted, counted=len(self._noted))
            with CancelScope(shield=True):
                failure.continues_session = await self._save()
        return failure


def _begun_after(finished: Sequence[ModelMessage]) -> History:
    """Return a history with an empty turn at its end."""
    return History(finished, len(finished), len(finished))


async def _checked(schema: Schema, output: Any) -> tuple[str, JsonValue]:
    """Return the text and the data of `output`. Raises Mismatch if the output does not fit."""
    text, data = stated(output)
    return text, await read_answer(schema, text, data)


def _output_type(schema: Schema) -> Any:
    """Return pydantic-ai's output type for a schema; None if the library takes no such schema."""
    from pydantic_ai import StructuredDict  # noqa: PLC0415
    from pydantic_ai.exceptions import UserError  # noqa: PLC0415

    try:
        return StructuredDict(json.loads(schema.text))
    except UserError:  # not an object, or a schema that refers to itself
        return None


# The values of pydantic-ai as ours: messages, outputs, usage, events and settings.


def from_stored(history: Sequence[Message]) -> list[ModelMessage]:
    """Return the stored text of a conversation as messages for a model."""
    from pydantic_ai.messages import (  # noqa: PLC0415
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        UserPromptPart,
    )

    messages: list[ModelMessage] = []
    for one in history:
        text = clean_text(one.content)
        if one.role == "assistant":
            messages.append(ModelResponse(parts=[TextPart(text)]))
        else:
            messages.append(
                ModelRequest(parts=[SystemPromptPart(text) if one.role == "system" else UserPromptPart(text)])
            )
    return messages


def stated(output: Any) -> tuple[str, JsonValue]:
    """Return an agent's output as text, and as JSON if the output is not text."""
    if isinstance(output, str):
        return clean_text(str(output)), None
    from pydantic_core import to_json  # noqa: PLC0415

    try:
        data = parse_json(clean_text(to_json(output).decode()))
    except (ValueError, TypeError) as error:
        name = type(output).__name__
        text = f"the agent's output is {name}, which JSON cannot hold: {one_line(str(error), 120)}"
        raise BackendError(ErrorKind.UNEXPECTED, text) from error
    return json.dumps(data, ensure_ascii=False), data


def clean_parts(response: Any) -> str:
    """Cut the thoughts out of a response's text, which is the answer and is sent again as history, and return them.

    Join the halves of characters that a stream delivered in two parts: a history with halves cannot be written.
    """
    texts: list[str] = []
    for part in response.parts:
        if part.part_kind in {"text", "thinking"}:
            part.content = clean_text(part.content)
        if part.part_kind == "text":  # a part of its own would be sent again in `<think>` by some of the models
            part.content, thoughts = split_thoughts(part.content)
            texts += [thoughts] if thoughts else []
    return "\n\n".join(texts)


def check_whole(response: Any) -> None:
    """Raise BackendError if a response of the model is not whole: an answer, or a call of tools."""
    reasons = [response.finish_reason or _server_reason(response)] if _says_why(response) else []
    if any(part.part_kind == "tool-call" for part in response.parts):
        reasons = without_calls(reasons)
    whole_answer(
        "".join(part.content for part in response.parts if part.part_kind == "text"),
        reasons,
        missing="" if _says_why(response) else "the model's answer broke off: it ended without a reason",
        usage=_usage(response),
        raise_limit="set a higher `max_tokens` of the backend (in Python in the agent's model_settings)",
        needs_text=False,  # pydantic-ai asks again for an answer without text
    )


def _server_reason(response: Any) -> str:
    """Return the server's own word for the reason, which pydantic-ai keeps in the details."""
    details: dict[str, Any] = response.provider_details or {}
    reason = details.get("finish_reason")
    return reason if isinstance(reason, str) else ""


def _says_why(response: Any) -> bool:
    """Return whether the server said why the answer ended.

    Without a word, pydantic-ai takes a stream of chat completions as complete; a server that also reports no usage was
    cut off. The library's models for tests report nothing.
    """
    counted = response.finish_reason and not getattr(response.usage, "unmeasured_requests", 0)
    return response.provider_name in {None, "test"} or bool(_server_reason(response) or counted)


def spent(messages: Sequence[ModelMessage]) -> Usage:
    """Return the sum of the usage that the messages report."""
    return sum((_usage(message) for message in messages if message.kind == "response"), NO_USAGE)


def _usage(response: Any) -> Usage:
    counts = response.usage
    cost = getattr(counts, "cost", None)
    name = response.model_name
    reasoning = getattr(counts, "output_reasoning_tokens", 0)
    # Some servers (xAI, Gemini) count reasoning beside the answer; it shows where the reasoning is the larger count.
    beside = reasoning if reasoning > counts.output_tokens else 0
    return counted(
        counts.input_tokens,
        counts.output_tokens + beside,
        None if cost is None else float(cost),
        model=shown(name) if name else None,
        cache_read=counts.cache_read_tokens,
        cache_write=counts.cache_write_tokens,
        cache_write_1h=getattr(counts, "cache_write_1h_tokens", 0),
        reasoning=reasoning,
    )


def reported(event: Any) -> Output | None:
    """Return the output that an event of a running turn shows; None for other events."""
    kind = event.event_kind
    if kind == "part_start" and event.part.part_kind == "text" and event.part.content:
        return Output("text", clean_text(event.part.content))
    if kind == "part_delta" and event.delta.part_delta_kind == "text" and event.delta.content_delta:
        return Output("text", clean_text(event.delta.content_delta))
    if kind == "function_tool_call":
        arguments: dict[str, Any] = event.part.args_as_dict() if event.args_valid is not False else {}
        return Output("tool", describe_tool_call(event.part.tool_name, arguments))
    return None


def settings_for(model: Any) -> dict[str, Any]:
    """Return the settings that switch the retries of the model's SDK off, if pydantic-ai can do so for the model."""
    from pydantic_ai.models import infer_model  # noqa: PLC0415

    if model is None:
        return {}
    ignored = getattr(infer_model(model), "unsupported_settings", ("max_retries",))
    return {} if "max_retries" in ignored else {"max_retries": 0}


# Histories in files, one for each session, with the tool calls that a stored message cannot hold.
#
# A file is rewritten after every step of a turn and replaced as a whole, so that it always holds a consistent history.
# An attempt after a crash goes on from the file; a turn that was not finished is left out by any other turn.


@value
class History:
    """The messages of a session, in pydantic-ai's form, and the state of its last turn."""

    messages: Sequence[Any] = ()
    turn: int = 0
    """The index of the last turn's first message."""
    counted: int = 0
    """The number of messages whose usage was reported, by a failed attempt, before the turn has ended."""
    answer: tuple[str, JsonValue] | None = None
    """The text and the data of the answer to the last turn; None while the turn goes on."""

    @property
    def finished(self) -> Sequence[Any]:
        """The messages of the finished turns."""
        return self.messages if self.answer is not None else self.messages[: self.turn]

    @classmethod
    def load(cls, path: Path) -> History | None:
        """Return the history in a session's file; None if there is none, or if the file cannot be read."""
        from pydantic_ai import ModelMessagesTypeAdapter  # noqa: PLC0415

        try:
            data = json.loads(path.read_bytes())
            messages = ModelMessagesTypeAdapter.validate_python(data["messages"])
            answer = None if data["answer"] is None else (str(data["answer"][0]), data["answer"][1])
            return cls(messages, int(data["turn"]), int(data["counted"]), answer)
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def save(self, path: Path) -> None:
        """Write the session's file, durably. Raises OSError, or ValueError if JSON cannot hold a message: no file is
        left then.
        """
        from pydantic_ai import ModelMessagesTypeAdapter  # noqa: PLC0415

        state = {"turn": self.turn, "counted": self.counted, "answer": self.answer}
        try:
            messages = ModelMessagesTypeAdapter.dump_json(list(self.messages)).decode()
            private_folder(path.parent)
            replace_file(path, f'{json.dumps(state)[:-1]}, "messages": {messages}}}', durably=True)
        except (OSError, ValueError):
            # A history without the newest turn would be taken for the whole; the stored text is better.
            path.unlink(missing_ok=True)
            raise


# The exceptions of a run of an agent as our kinds of errors.

_BY_CLASS: Mapping[str, ErrorKind] = {
    "ContentFilterError": ErrorKind.REFUSED,
    **dict.fromkeys(("OutputTokenLimitExceeded", "IncompleteToolCall"), ErrorKind.TRUNCATED),
    "UnexpectedModelBehavior": ErrorKind.INVALID_OUTPUT,
    **dict.fromkeys(("UsageLimitExceeded", "UserError", "ModelRequestRejectedError"), ErrorKind.INVALID_REQUEST),
    "ModelRateLimitError": ErrorKind.RATE_LIMITED,
    "ModelQuotaExceededError": ErrorKind.NO_CREDIT,
    "ModelAuthenticationError": ErrorKind.AUTH,
    "ModelUnavailableError": ErrorKind.OVERLOADED,
    **dict.fromkeys(("ModelTimeoutError", "ModelRequestTimeout"), ErrorKind.TIMEOUT),
    "ModelContextWindowExceededError": ErrorKind.CONTEXT_OVERFLOW,
    **dict.fromkeys(("ModelServerError", "ModelConnectionError", "ModelAPIError", "MCPError", "McpError",
                     "ClosedResourceError", "BrokenResourceError", "ConnectionError", "TimeoutError"),
                    ErrorKind.TRANSIENT),
}  # fmt: skip
"""Kinds by the name of an exception's class, the nearest class first. By name, because versions of pydantic-ai differ
in the classes that they have.
"""
_CONNECTION_CLOSED = -32000
"""The code of an MCP error that says that the server is gone. Other codes are mistakes of the model."""
_LIMIT = 400


def failure_of(error: Exception) -> BackendError:
    """Return the error of a turn that ended with `error`."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, BackendUnavailable):
        return BackendError(ErrorKind.UNAVAILABLE, str(error))
    if isinstance(error, ExceptionGroup):  # all models of a FallbackModel have failed; the last was the last hope
        return failure_of(cast("ExceptionGroup[Exception]", error).exceptions[-1])
    status = getattr(error, "status_code", None)
    if type(status) is int and hasattr(error, "body"):
        failure = _http_error(status, error)
    else:
        text = ": ".join(filter(None, (type(error).__name__, masked_line(str(error), _LIMIT))))
        failure = BackendError(_kind_by_class(error), text)
    if not any(kind.__module__.startswith("pydantic_ai.") for kind in type(error).__mro__):  # of a tool, most likely
        failure = BackendError(failure.kind, failure.message + place_of(error), traceback=format_traceback(error))
    wait = getattr(error, "retry_after", None)  # from the server's header, or else from the error's body
    if not isinstance(wait, int | float):
        wait = announced_wait(getattr(error, "body", None), time.time())
    failure.retry_after = None if wait is None else float(wait)
    return failure


def masked_line(text: str, limit: int = 300) -> str:
    """Return `text` in one line, without the values of environment variables that are named like secrets."""
    return without_secrets(one_line(text, limit))


def _http_error(status: int, error: Any) -> BackendError:
    """Return the error of an answer with a status, to a request of the library or, without a model, of a tool."""
    words, detail = read_error(error.body)
    detail = str(error) if detail == NO_REASON else detail
    words += [word for name in ("provider_error_code", "provider_error_type") if (word := getattr(error, name, None))]
    model = getattr(error, "model_name", None)
    source = f"{type(error).__name__}: the server" if model is None else f"model {model}"
    text = f"{source} answered with status {status}: {masked_line(detail, _LIMIT)}"
    has_wait = getattr(error, "retry_after", None) is not None
    return BackendError(kind_of(status, words, detail, has_wait=has_wait), text)


def _kind_by_class(error: Exception) -> ErrorKind:
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ in {"MCPError", "McpError"} and getattr(cause, "code", None) == _CONNECTION_CLOSED:
            return ErrorKind.TRANSIENT
        cause = cause.__cause__
    return next((_BY_CLASS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _BY_CLASS),
                ErrorKind.UNEXPECTED)  # fmt: skip
