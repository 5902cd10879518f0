"""One turn with an agent that speaks the Agent Client Protocol, as a state machine without any I/O.

    INITIALIZE -> OPEN [-> AUTHENTICATE -> OPEN_AGAIN] [-> MODEL] [-> MODE] -> PROMPT -> its answer

The machine takes the agent's messages as input, and returns the messages to send. Equal output leads to an equal state:
a process that adopts a turn reads the output from its start, and sends the messages not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from plait.backends.agents.acp_messages import (
    AUTH_REQUIRED,
    PHRASES,
    VERSION,
    AcpStep,
    Grant,
    Message,
    PermissionPolicy,
    PermissionRequest,
    Updates,
    answer,
    answering,
    choose,
    error_in_text,
    error_of,
    list_login_methods,
    needs_person,
    notification,
    permission_request,
    refusal,
    request,
    stopped_by_denial,
)
from plait.backends.agents.acp_outbox import SentMessages
from plait.backends.agents.agent_catalog import UNKNOWN, CatalogEntry, acp_agent_named
from plait.backends.agents.agent_errors import failure, no_outcome
from plait.backends.agents.agent_protocol import Call, ProcessEnd, TurnAnswer
from plait.backends.backend_protocol import Output
from plait.backends.error_kinds import seconds_left
from plait.backends.json_fields import at, tables, text
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import shown
from plait.usage import Usage


@value
class AgentCapabilities:
    """The capabilities of an agent, as announced."""

    agent: CatalogEntry = UNKNOWN
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
        acp_agent_named(name), title, loads, "resume" in can, "fork" in can, at(initialized, "authMethods")
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
    options = tables(opened, "configOptions")
    return next((one for one in options if what in {text(one, "category"), text(one, "id")}), None)


def _flat(options: Sequence[Mapping[str, JsonValue]]) -> Iterator[Mapping[str, JsonValue]]:
    """Yield the options, with groups flattened."""
    for option in options:
        yield from tables(option, "options") or [option]


_INTRODUCTION: Message = {
    "protocolVersion": 1,
    "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
    "clientInfo": {"name": "plait", "version": "1"},
}
_CANCELLED: JsonValue = {"outcome": {"outcome": "cancelled"}}


@value
class TurnGoals:
    """The purpose and the settings of a turn, beside its Call."""

    cwd: str
    """Working folder of the session."""
    model: str | None = None
    """Id or name of the model; None for the agent's choice."""
    mode: str | None = None
    """Id or name of the mode; None for the agent's choice."""
    auth_method: str | None = None
    """Id of the login method; None for no login."""
    permissions: PermissionPolicy = "deny"
    """Policy for permission requests."""
    grant: Grant | None = None
    """A person's decision on one request."""
    prompt: str = ""
    """Text of the prompt."""
    holds: Sequence[str] = ()
    """Earlier prompts; if not empty, the session has to contain one of these prompts."""
    earlier_prompts: Sequence[str] = ()
    """Like `holds`, for agents that may reuse a session id for another session."""


class AcpMachine:
    """The state machine of one turn; a `Reader`.

    `goals` may be replaced before the first message is read. `now` returns the Unix time.
    """

    def __init__(self, call: Call, goals: TurnGoals, now: Callable[[], float]) -> None:
        self.goals = goals
        self.permission_request: PermissionRequest | None = None
        """Request to be decided by a person; the turn then ends."""
        self._call = call
        self._now = now
        self._agent = AgentCapabilities()
        self._session = call.session_id if call.resume else None
        self._opens = ""
        self._offers: JsonValue = None
        self._settings: list[Message] = []
        self._steps: Mapping[AcpStep, Callable[[Mapping[str, JsonValue]], None]] = {
            AcpStep.INITIALIZE: self._initialized,
            AcpStep.OPEN: self._session_answered,
            AcpStep.AUTHENTICATE: self._authenticated,
            AcpStep.OPEN_AGAIN: self._session_answered,
            AcpStep.MODEL: self._setting_answered,
            AcpStep.MODE: self._setting_answered,
            AcpStep.PROMPT: self._prompt_answered,
        }
        self._sent = SentMessages()
        self._answered_steps: set[AcpStep] = set()
        self._begun = False
        self._is_cancelled = False
        self._shown: list[Output] = []
        self._updates = Updates()
        self._denied: list[str] = []
        self._result: JsonValue = None
        self._failure: BackendError | None = None
        self._sent.send(request(AcpStep.INITIALIZE, "initialize", _INTRODUCTION))

    def restore_sent(self, messages: Iterable[Message]) -> None:
        """Record the messages already sent by an earlier process of the turn."""
        messages = list(messages)
        self._sent.restore(messages)
        for message in messages:
            if at(message, "id") in {AcpStep.OPEN.value, AcpStep.OPEN_AGAIN.value} and "method" in message:
                self._opens = text(message, "method")
                if self._opens in {"session/load", "session/resume"}:
                    self._session = text(message, "params", "sessionId")

    def take(self) -> list[Message]:
        """Return the messages to send now, and record the messages as sent."""
        return self._sent.take()

    def cancel(self) -> None:
        """Request the end of the turn: from now on, nothing is permitted and nobody is asked."""
        self._is_cancelled = True
        if self.session_id is not None:
            self._sent.send(self._cancellation())

    @property
    def session_id(self) -> str | None:
        """The session's id, once the prompt was sent."""
        return self._session if self._sent.sent_step(AcpStep.PROMPT) else None

    @property
    def announced(self) -> str | None:
        """The session's id, once the session is open."""
        return self._session

    @property
    def is_final(self) -> bool:
        """Whether the prompt has been answered or has failed."""
        return self._result is not None or self._failure is not None

    @property
    def usage(self) -> Usage:
        """Usage counted so far."""
        model = answering(self._result)
        if not model and (self._result is not None or not self._updates.is_silent):  # the model has answered
            model = self.goals.model or current(self._offers, "model")
        return replace(self._updates.total(self._result), model=shown(model) or None)

    @property
    def last_text(self) -> str:
        """The last message of the answer."""
        return self._updates.text

    @property
    def last_whole(self) -> str | None:
        """None: ACP has no way to rewind a session."""
        return None

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one message of the agent, and return the outputs in the message."""
        self._shown = []
        try:
            self._handle(event)
        except BackendError as error:
            self._failure = self._failure or error
        return self._shown

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer, or the question for a person. Raises BackendError if the turn failed."""
        if self._failure is not None:
            raise self._failure
        if self.permission_request is not None:
            question = self.permission_request.question
            words = "\n\n".join(filter(None, (self._updates.text, f"({question.text})")))
            return self._answer(replace(TurnAnswer(words), question=question))
        if self._result is None:
            raise self._failure_of(*no_outcome(self._agent.title, ending, PHRASES))
        reason = text(self._result, "stopReason")
        wrong = stopped_by_denial(reason, self._denied, is_silent=self._updates.is_silent)
        if reason == "end_turn":
            wrong = wrong or error_in_text(self._agent.agent, self._result, self._updates, self.goals.prompt)
        if wrong is not None:
            raise self._failure_of(wrong[0], f"{self._agent.title}: {wrong[1]}")
        return self._answer(TurnAnswer(self._updates.answer, reasons=[reason or "none given"]))

    def _answer(self, answered: TurnAnswer) -> TurnAnswer:
        return replace(answered, usage=self.usage, denied=tuple(self._denied))

    def _failure_of(self, kind: ErrorKind, message: str) -> BackendError:
        wait, goes_on = seconds_left(message, self._now()), self.session_id is not None
        return failure(kind, message, wait=wait, usage=self.usage, continues_session=goes_on)

    def _error_failure(
        self, event: Mapping[str, JsonValue], more: str = "", *, opens_session: bool = False
    ) -> BackendError:
        kind, message = error_of(at(event, "error"), opens_session=opens_session)
        return self._failure_of(kind, f"{self._agent.title}: {message}{more}")

    def _show(self, kind: Literal["waiting", "notice"], words: str) -> None:
        self._shown.append(Output(kind, words, self.usage))

    def _handle(self, event: Mapping[str, JsonValue]) -> None:
        method = text(event, "method")
        if method == "session/update":
            self._update(at(event, "params"))
        elif method == "session/request_permission":
            self._permission_requested(at(event, "id"), at(event, "params"))
        elif method and "id" in event:
            self._sent.send(refusal(at(event, "id"), method))
        elif not method:
            self._step(event)

    def _step(self, event: Mapping[str, JsonValue]) -> None:
        """Handle the answer to a request of this client. Unknown and repeated answers are ignored."""
        identity = at(event, "id")
        step = next((step for step in AcpStep if type(identity) is int and step.value == identity), None)
        if step is not None and self._sent.has_step(step) and step not in self._answered_steps:
            self._answered_steps.add(step)
            self._steps[step](event)

    def _initialized(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            raise self._error_failure(event)
        self._agent = capabilities_of(at(event, "result"))
        self._open(AcpStep.OPEN)

    def _open(self, step: AcpStep) -> None:
        if not self._sent.has_step(step):
            message = open_message(step, self._call, self.goals.cwd, self._agent, checks=bool(self._prompts_to_find))
            self._opens = text(message, "method")
            self._sent.send(message)

    @property
    def _prompts_to_find(self) -> Sequence[str]:
        return self.goals.holds or (self.goals.earlier_prompts if self._agent.agent.counts_sessions else ())

    def _session_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            self._session_refused(event)
            return
        self._offers = at(event, "result")
        self._session = text(self._offers, "sessionId") or self._session
        if self._session is None:
            raise self._failure_of(
                ErrorKind.INVALID_REQUEST, f"{self._agent.title} opened a session without an id; update the agent"
            )
        self._settings = list(settings(self._offers, self._session, self.goals.model, self.goals.mode))
        self._send_next()

    def _session_refused(self, event: Mapping[str, JsonValue]) -> None:
        wants_login = at(event, "error", "code") == AUTH_REQUIRED and AcpStep.AUTHENTICATE not in self._answered_steps
        if wants_login and self.goals.auth_method is not None:
            self._sent.send(request(AcpStep.AUTHENTICATE, "authenticate", {"methodId": self.goals.auth_method}))
            return
        raise self._error_failure(event, self._login_hint(event), opens_session=self._opens != "session/new")

    def _login_hint(self, event: Mapping[str, JsonValue]) -> str:
        if at(event, "error", "code") != AUTH_REQUIRED:
            return ""
        methods = list_login_methods(self._agent.login_methods)
        return f"; log in with the agent's own command, or set auth_method to one of: {methods}"

    def _authenticated(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            kind, message = error_of(at(event, "error"))
            kind = kind if kind is ErrorKind.RATE_LIMITED else ErrorKind.AUTH
            raise self._failure_of(
                kind, f"{self._agent.title}: {message}; login methods: {list_login_methods(self._agent.login_methods)}"
            )
        self._open(AcpStep.OPEN_AGAIN)

    def _send_next(self) -> None:
        """Send the next setting, or the prompt."""
        if self._opens == "session/load" and not self._updates.holds(self._prompts_to_find):
            raise self._failure_of(
                ErrorKind.SESSION_LOST, "the session does not hold the earlier prompt; start a new session"
            )
        while self._settings:
            message = self._settings.pop(0)
            if self._sent.was_sent(message) or not self._sent.sent_step(AcpStep.PROMPT):
                self._sent.send(message)
                return
        self._begun = True
        words: JsonValue = [{"type": "text", "text": self.goals.prompt}]
        self._sent.send(request(AcpStep.PROMPT, "session/prompt", {"sessionId": self._session, "prompt": words}))

    def _setting_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            what = "model" if at(event, "id") == AcpStep.MODEL.value else "mode"
            names = ", ".join(identity for identity, _ in choices(self._offers, what)) or f"no {what} to choose"
            raise self._failure_of(
                ErrorKind.INVALID_REQUEST, f"{error_of(at(event, 'error'))[1]}; the agent offers {names}"
            )
        self._send_next()

    def _prompt_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event and self.permission_request is None:
            raise self._error_failure(event, self._login_hint(event))
        self._result = at(event, "result") or {}

    def _update(self, params: JsonValue) -> None:
        update = at(params, "update")
        if not self._begun:
            self._updates.past(update)
        elif text(params, "sessionId") == self._session:
            seen = self._updates.read(update)
            self._shown += seen if self.permission_request is None else []

    def _permission_requested(self, identity: JsonValue, params: JsonValue) -> None:
        """Handle a permission request."""
        if self._is_cancelled:
            self._sent.send(answer(identity, _CANCELLED))
            return
        permission, goals = permission_request(params), self.goals
        was_answered = self._sent.was_sent(answer(identity, None)) and not self._sent.was_sent(self._cancellation())
        if (
            self.permission_request is None
            and not was_answered
            and needs_person(permission, goals.permissions, goals.grant)
        ):
            self.permission_request = permission
            self._show("waiting", permission.question.text)
            self._sent.send(self._cancellation())
        option = None if self.permission_request is not None else choose(permission, goals.permissions, goals.grant)
        chosen: JsonValue = {"outcome": {"outcome": "selected", "optionId": option.identity}} if option else _CANCELLED
        self._sent.send(answer(identity, chosen))
        if self.permission_request is not None:
            return
        self._shown += self._updates.tool(at(params, "toolCall"))
        if option is None or option.kind.startswith("reject"):
            self._updates.is_silent = True
            self._denied.append(permission.about)
            self._show("notice", f"not allowed: {permission.about}")

    def _cancellation(self) -> Message:
        return notification("session/cancel", {"sessionId": self._session})
