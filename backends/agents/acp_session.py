"""Requests to open and set up a session with an agent that speaks ACP, according to the agent's capabilities. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.backends.agents.acp_messages import VERSION, AcpStep, Message, request
from plait.backends.agents.acp_quirks import UNKNOWN, AcpQuirks, of_name
from plait.backends.agents.agent_errors import failure
from plait.backends.agents.agent_protocol import Call
from plait.backends.json_fields import at, tables, text
from plait.errors import ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import shown


@value
class AgentCapabilities:
    """The capabilities of an agent, as announced."""

    agent: AcpQuirks = UNKNOWN
    title: str = "the agent"
    """Name for people."""
    loads: bool = False
    """The agent supports `session/load`."""
    resumes: bool = False
    """The agent supports `session/resume`."""
    forks: bool = False
    """The agent supports `session/fork`."""
    login_methods: JsonValue = None
    """Login methods, as listed by the agent."""


def capabilities_of(initialized: JsonValue) -> AgentCapabilities:
    """Return the capabilities in the answer to `initialize`.

    Raises BackendError (invalid_request) if the agent speaks another version of the protocol.
    """
    name = text(initialized, "agentInfo", "name")
    version = at(initialized, "protocolVersion")
    title = shown(text(initialized, "agentInfo", "title") or name or "the agent", 60)
    if version != VERSION:
        raise failure(
            ErrorKind.INVALID_REQUEST, f"{title} speaks version {version!r} of ACP; plait needs version {VERSION}"
        )
    more = at(initialized, "agentCapabilities", "sessionCapabilities")
    can = (
        {name for name in more if more[name] is not None and more[name] is not False}
        if isinstance(more, dict)
        else set[str]()
    )
    loads = at(initialized, "agentCapabilities", "loadSession") is True
    return AgentCapabilities(
        of_name(name), title, loads, "resume" in can, "fork" in can, at(initialized, "authMethods")
    )


def open_message(step: AcpStep, call: Call, cwd: str, capabilities: AgentCapabilities, *, checks: bool) -> Message:
    """Return the request that opens the session of `call`.

    With `checks`, the request makes the agent send the session's earlier messages, if possible. Raises BackendError
    (session_lost) if the agent cannot open the session.
    """
    params: Message = {"cwd": cwd, "mcpServers": []}
    if call.resume:
        if call.session_id is None:
            raise failure(ErrorKind.SESSION_LOST, "the session id is unknown")
        if capabilities.agent.spoils_loaded:
            raise failure(ErrorKind.SESSION_LOST, f"{capabilities.title} loses sessions by loading them")
        if not (capabilities.loads or capabilities.resumes):
            raise failure(ErrorKind.SESSION_LOST, f"{capabilities.title} cannot continue a session")
        method = "session/load" if capabilities.loads and (checks or not capabilities.resumes) else "session/resume"
        return request(step, method, {"sessionId": call.session_id, **params})
    if call.forks is not None:
        if not capabilities.forks:
            raise failure(ErrorKind.SESSION_LOST, f"{capabilities.title} cannot fork a session")
        return request(step, "session/fork", {"sessionId": call.forks, **params})
    return request(step, "session/new", params)


def settings(opened: JsonValue, session: str, model: str | None, mode: str | None) -> Iterator[Message]:
    """Yield the requests that set model and mode, unless already set in the session."""
    if model is not None:
        yield from _setting(AcpStep.MODEL, "model", opened, session, model)
    if mode is not None:
        yield from _setting(AcpStep.MODE, "mode", opened, session, mode)


def choices(opened: JsonValue, what: str) -> Sequence[tuple[str, str]]:
    """Return the ids and names of the models or modes offered by the session; `what` is "model" or "mode"."""
    listed = tables(opened, f"{what}s", f"available{what.title()}s")
    if listed:
        return [(text(one, "modelId") or text(one, "id"), text(one, "name")) for one in listed]
    return [(text(one, "value"), text(one, "name")) for one in _flat(tables(_config(opened, what), "options"))]


def current(opened: JsonValue, what: str) -> str:
    """Return the id of the session's current "model" or "mode"; empty if unknown."""
    return text(opened, f"{what}s", f"current{what.title()}Id") or text(_config(opened, what), "currentValue")


def _setting(step: AcpStep, what: str, opened: JsonValue, session: str, wanted: str) -> Iterator[Message]:
    offered = choices(opened, what)
    named = next((identity for identity, name in offered if name == wanted), wanted)
    chosen: JsonValue = wanted if any(identity == wanted for identity, _ in offered) else named
    if current(opened, what) == chosen:
        return
    config = _config(opened, what)
    params: Message = {"sessionId": session}
    if config is not None and at(opened, f"{what}s") is None:
        params.update(configId=at(config, "id"), value=chosen)
        yield request(step, "session/set_config_option", params)
        return
    params[f"{what}Id"] = chosen
    yield request(step, f"session/set_{what}", params)


def _config(opened: JsonValue, what: str) -> Mapping[str, JsonValue] | None:
    found = tables(opened, "configOptions")
    return next((one for one in found if what in {text(one, "category"), text(one, "id")}), None)


def _flat(options: Sequence[Mapping[str, JsonValue]]) -> Iterator[Mapping[str, JsonValue]]:
    """Yield the options, with groups flattened."""
    for option in options:
        yield from tables(option, "options") or [option]
