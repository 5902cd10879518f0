"""One turn with an agent that speaks the Agent Client Protocol, as a state machine without any I/O.

    INITIALIZE -> OPEN [-> AUTHENTICATE -> OPEN_AGAIN] [-> MODEL] [-> MODE] -> PROMPT -> its answer

The messages are JSON-RPC 2.0, one object a line. The machine takes those of the agent as input, and returns those to
send. Equal output leads to an equal state: a process that adopts a turn reads the output from its start, and sends the
messages not sent yet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum
from typing import Literal, TypeAlias

from plait.backends.agents.agent_catalog import UNKNOWN, acp_agent_named
from plait.backends.agents.agent_output import (
    THROTTLED,
    WORDS,
    AgentCall,
    ProcessEnd,
    TurnAnswer,
    by_phrase,
    classify,
    failure,
    kind_of_failure,
    no_outcome,
)
from plait.backends.backend_protocol import Output
from plait.backends.error_kinds import error_text, seconds_left
from plait.backends.json_fields import at, count, counted, describe_tool_call, number, tables, text
from plait.backends.whole_answer import kind_of_reason
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import clean_text, shown
from plait.usage import NO_USAGE, Usage

# The messages. The requests of this client have fixed ids, so that each answer in an agent's output can be matched to
# its request.

Message: TypeAlias = "dict[str, JsonValue]"
VERSION = 1
AUTH_REQUIRED, NOT_FOUND, NO_SUCH_METHOD = -32000, -32002, -32601


class AcpStep(IntEnum):
    """The requests of a turn, in order. The value is the request's id."""

    INITIALIZE = 1
    OPEN = 2
    AUTHENTICATE = 3
    OPEN_AGAIN = 4
    """Sent after authentication."""
    MODEL = 5
    MODE = 6
    PROMPT = 7


def request(step: AcpStep, method: str, params: Message) -> Message:
    """Return a request to the agent."""
    return {"jsonrpc": "2.0", "id": step.value, "method": method, "params": params}


def notification(method: str, params: Message) -> Message:
    """Return a message that needs no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def answer(identity: JsonValue, result: JsonValue) -> Message:
    """Return the answer to a request of the agent."""
    return {"jsonrpc": "2.0", "id": identity, "result": result}


def refusal(identity: JsonValue, method: str) -> Message:
    """Return the answer to a request for an unsupported method."""
    error: JsonValue = {"code": NO_SUCH_METHOD, "message": f"{method[:80]} is not supported"}
    return {"jsonrpc": "2.0", "id": identity, "error": error}


def name_of(message: Mapping[str, JsonValue] | AcpStep) -> str:
    """Return a name that identifies a message to the agent, or the request of a step, within a turn: each message is
    sent once.
    """
    if isinstance(message, AcpStep):
        return f"request {message.value}"
    identity = json.dumps(at(message, "id"))
    if "method" not in message:
        return f"answer {identity}"
    return f"request {identity}" if "id" in message else text(message, "method")


def prompt_of(message: Mapping[str, JsonValue]) -> str | None:
    """Return the prompt in a message to the agent; None if the message is no prompt."""
    if text(message, "method") != "session/prompt":
        return None
    return "".join(text(part, "text") for part in tables(at(message, "params"), "prompt"))


PermissionPolicy: TypeAlias = Literal["deny", "allow", "ask"]
_FIRST: Mapping[str, Sequence[str]] = {
    "allow": ("allow_once", "allow_always"),
    "deny": ("reject_once", "reject_always"),
}


@value
class Option:
    """An answer offered by the agent."""

    identity: str
    name: str
    kind: str
    """The protocol's name, such as allow_once."""


@value
class PermissionRequest:
    """A permission request of an agent."""

    action_id: str
    """Id of the action: equal for an equal action in any turn."""
    about: str
    """Short description of the action."""
    options: Sequence[Option]

    @property
    def question(self) -> Question:
        """The question to a person."""
        names = [option.name for option in self.options]
        return Question(f"the agent asks for permission: {self.about} ({', '.join(names)})", {"enum": list(names)})

    def option(self, choice: str | None, policy: PermissionPolicy) -> Option | None:
        """Return the option with the name that a person chose, else the one of the policy; None for none."""
        if choice is not None:
            return next((option for option in self.options if option.name == choice), None)
        kinds = _FIRST["allow" if policy == "allow" else "deny"]
        return next((option for kind in kinds for option in self.options if option.kind == kind), None)


def permission_request(params: JsonValue) -> PermissionRequest:
    """Return the request in the parameters of `session/request_permission`."""
    tool, options = at(params, "toolCall"), list[Option]()
    for offer in tables(params, "options"):
        identity, name = text(offer, "optionId"), shown(text(offer, "name"), 200)
        if not name or any(option.name == name for option in options):
            name = f"{name} ({shown(identity, 100)})".lstrip()
        options.append(Option(identity, name, text(offer, "kind")))
    return PermissionRequest(_action_id(tool), describe(tool), options)


def describe(tool: JsonValue) -> str:
    """Return a short description of a tool call."""
    title, call = text(tool, "title"), describe_tool_call("", at(tool, "rawInput")).removeprefix(": ")
    if call and call not in title:
        title = f"{title}: {call}" if title else call
    return shown(title or text(tool, "kind") or "a tool", 200)


def answer_prompt(answer: str) -> str:
    """Return the prompt that passes a person's answer to an agent stopped at a permission request."""
    return (
        "You asked for permission to use a tool, and were stopped until there was an answer. If the answer allows it, "
        "use the tool now exactly as you wanted to, and go on with what you were asked to do; if not, go on without "
        f"it. The answer is: {answer}"
    )


def _action_id(tool: JsonValue) -> str:
    tool_input = at(tool, "rawInput")
    if isinstance(tool_input, dict) and tool_input:
        # The description is worded differently each time.
        action: JsonValue = {
            key: tool_input[key] for key in tool_input if not ("command" in tool_input and key == "description")
        }
    else:
        action = [text(tool, "title"), at(tool, "content")]
    whole = json.dumps([text(tool, "kind"), action], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def tokens_of(usage: JsonValue) -> Usage:
    """Return the tokens in `usage`. Agents count cached and thought tokens inside or beside the rest; the total shows
    which.
    """
    read, written, total = (count(usage, f"{name}Tokens") for name in ("input", "output", "total"))
    cache_read, cache_write = count(usage, "cachedReadTokens"), count(usage, "cachedWriteTokens")
    if read + written != total:
        read += cache_read + cache_write
        written = max(written, total - read)
    thought = count(usage, "thoughtTokens")
    return counted(read, written, cache_read=cache_read, cache_write=cache_write, reasoning=thought)


_LOST = ("not found", "invalid session identifier", "no previous sessions", "service failure")
"""Parts of a message, in lower case, with which agents refuse to open a session that they do not have."""
_BY_CODE: Mapping[int, ErrorKind] = {
    AUTH_REQUIRED: ErrorKind.AUTH,
    NOT_FOUND: ErrorKind.SESSION_LOST,
    -32600: ErrorKind.INVALID_REQUEST,
    -32601: ErrorKind.INVALID_REQUEST,
    -32602: ErrorKind.INVALID_REQUEST,
}


def error_of(error: JsonValue, *, opens_session: bool = False) -> tuple[ErrorKind, str]:
    """Return kind and message of a JSON-RPC `error`; `opens_session` if the error may mean that the session cannot be
    continued.
    """
    code, message = at(error, "code"), _message(error)
    code = code if isinstance(code, int) else int(number(error, "code") or 0)
    if opens_session and code != AUTH_REQUIRED:
        kind = by_phrase(message)
        is_lost = kind is ErrorKind.SESSION_LOST or (kind is None and any(part in message.lower() for part in _LOST))
        if code == NOT_FOUND or is_lost:
            return ErrorKind.SESSION_LOST, message
    if THROTTLED in message.lower():
        return ErrorKind.OVERLOADED, message
    word = text(error, "data", "errorKind")
    if named := WORDS.get(word) or kind_of_reason(word):
        return named, message
    if 400 <= code < 600:
        return classify(message, code), message
    return _BY_CODE.get(code) or classify(message), message


def stopped_by_denial(reason: str, denied: Sequence[str], *, is_silent: bool) -> tuple[ErrorKind, str] | None:
    """Return kind and message of the error of a turn that a denied action ended, for `reason`; None for another turn.

    `is_silent` says that the agent wrote no text after the last of the `denied` actions.
    """
    if denied and (reason == "cancelled" or (reason == "end_turn" and is_silent)):
        return ErrorKind.INVALID_REQUEST, f"the turn stopped after a denied action: {denied[-1]}; change `permissions`"
    return None


def list_login_methods(methods: JsonValue) -> str:
    """Return the login methods offered in the agent's answer to `initialize`."""
    ways = [f"{text(way, 'id')} ({text(way, 'name')})" for way in tables({"all": methods}, "all")]
    return shown(", ".join(ways) or "none", 200)


def _words(value: JsonValue, name: str) -> str:
    return text(value, name) or clean_text(error_text(at(value, name)))


def _message(error: JsonValue) -> str:
    """Return the error's message, without details that repeat the request."""
    message, data = _words(error, "message"), at(error, "data")
    details = data if isinstance(data, str) else _words(data, "details") or _words(data, "message")
    return f"{message}: {details}" if details and details not in message else message or "no reason given"


_INTRODUCTION: Message = {
    "protocolVersion": VERSION,
    "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
    "clientInfo": {"name": "plait", "version": "1"},
}
_UNNUMBERED = "\0"
_TELLING = 500
"""Number of characters that identify a prompt."""
_IN_BRACKETS = re.compile(r"\(([45]\d\d)\b")
_CANCELLED: JsonValue = {"outcome": {"outcome": "cancelled"}}


@value
class TurnGoals:
    """The purpose and the settings of a turn, beside its AgentCall."""

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
    granted: Mapping[str, str] = field(default_factory=dict[str, str])
    """A person's decision, the name of an option, by the id of the action (`PermissionRequest.action_id`)."""
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

    last_whole: str | None = None
    """None: ACP has no way to rewind a session."""

    def __init__(self, call: AgentCall, goals: TurnGoals, now: Callable[[], float]) -> None:
        self.goals = goals
        self.permission_request: PermissionRequest | None = None
        """Request to be decided by a person; the turn then ends."""
        self.announced = call.session_id if call.resume else None
        """The session's id, once the session is open."""
        self._call = call
        self._now = now
        self._agent = UNKNOWN
        self._title = "the agent"
        self._loads = False
        """Whether the agent supports `session/load`."""
        self._abilities: set[str] = set()
        """Of sessions, as announced: "resume", "fork"."""
        self._login_methods: JsonValue = None
        self._opening = ""
        """The method that opens the session."""
        self._session: JsonValue = None
        """The open session, with the models and modes that it offers."""
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
        self._sent: set[str] = set()
        """The names of the messages sent, by any process."""
        self._queue: dict[str, Message] = {}
        self._answered_steps: set[AcpStep] = set()
        self._has_prompt = False
        self._is_cancelled = False
        self._outputs: list[Output] = []
        self._past_prompts: list[str] = []
        """Pieces of the user's earlier prompts, sent by an agent that loads a session."""
        self._used_tools = False
        self._is_silent = True
        """Whether the agent wrote no text since the start of the turn, or since the last refusal."""
        self._messages: dict[str, str] = {}
        """Messages by id, the most recently extended message last."""
        self._notes = 0
        self._ends_in_text = False
        """Whether no tool was called since the last piece of text: text before a tool is no answer."""
        self._tools: dict[str, str] = {}
        self._counted = NO_USAGE
        self._cost: float | None = None
        self._denied: list[str] = []
        self._result: JsonValue = None
        self._failure: BackendError | None = None
        self._send(request(AcpStep.INITIALIZE, "initialize", _INTRODUCTION))

    def restore_sent(self, messages: Iterable[Message]) -> None:
        """Record the messages already sent by an earlier process of the turn."""
        for message in messages:
            name = name_of(message)
            self._sent.add(name)
            self._queue.pop(name, None)
            if at(message, "id") in {AcpStep.OPEN.value, AcpStep.OPEN_AGAIN.value} and "method" in message:
                self._opening = text(message, "method")
                if self._opening in {"session/load", "session/resume"}:
                    self.announced = text(message, "params", "sessionId")

    def take(self) -> list[Message]:
        """Return the messages to send now, and record the messages as sent."""
        messages = list(self._queue.values())
        self._sent.update(self._queue)
        self._queue = {}
        return messages

    def _send(self, message: Message) -> None:
        """Queue a message, unless already sent."""
        name = name_of(message)
        if name not in self._sent:
            self._queue.setdefault(name, message)

    def cancel(self) -> None:
        """Request the end of the turn: from now on, nothing is permitted and nobody is asked."""
        self._is_cancelled = True
        if self.session_id is not None:
            self._send(self._cancellation())

    @property
    def session_id(self) -> str | None:
        """The session's id, once the prompt was sent."""
        return self.announced if name_of(AcpStep.PROMPT) in self._sent else None

    @property
    def is_final(self) -> bool:
        """Whether the prompt has been answered or has failed."""
        return self._result is not None or self._failure is not None

    @property
    def usage(self) -> Usage:
        """Usage from the turn's result or, if that has no counts, as counted so far."""
        used = tables(self._result, "_meta", "quota", "model_usage")
        model = text(used[0], "model") if len(used) == 1 else ""
        if not model and (self._result is not None or not self._is_silent):  # the model has answered
            model = self.goals.model or self._current("model")
        counts, quota = tokens_of(at(self._result, "usage")), at(self._result, "_meta", "quota", "token_count")
        counts = counts if counts != NO_USAGE else Usage(count(quota, "input_tokens"), count(quota, "output_tokens"))
        return replace(self._counted if counts == NO_USAGE else counts, cost_usd=self._cost, model=shown(model) or None)

    @property
    def last_text(self) -> str:
        """The last message. Agents that number their messages insert notes without a number, which count only where
        there is nothing else.
        """
        last = [*reversed(self._messages.items())]
        numbered = (message for identity, message in last if not identity.startswith(_UNNUMBERED))
        return next(numbered, last[0][1] if last else "")

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one message of the agent, and return the outputs in the message."""
        self._outputs = []
        method = text(event, "method")
        try:
            if method == "session/update":
                self._update(at(event, "params"))
            elif method == "session/request_permission":
                self._permission_requested(at(event, "id"), at(event, "params"))
            elif method and "id" in event:
                self._send(refusal(at(event, "id"), method))
            elif not method:
                self._step(event)
        except BackendError as error:
            self._failure = self._failure or error
        return self._outputs

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer, or the question for a person. Raises BackendError if the turn failed."""
        if self._failure is not None:
            raise self._failure
        if self.permission_request is not None:
            question = self.permission_request.question
            words = "\n\n".join(filter(None, (self.last_text, f"({question.text})")))
            return TurnAnswer(words, usage=self.usage, question=question)
        if self._result is None:
            raise self._failed(*no_outcome(self._title, ending))
        reason = text(self._result, "stopReason")
        wrong = stopped_by_denial(reason, self._denied, is_silent=self._is_silent)
        if reason == "end_turn":
            wrong = wrong or self._error_in_text()
        if wrong is not None:
            raise self._failed(wrong[0], f"{self._title}: {wrong[1]}")
        return TurnAnswer(
            self.last_text if self._ends_in_text else "", usage=self.usage, reasons=[reason or "none given"]
        )

    def _error_in_text(self) -> tuple[ErrorKind, str] | None:
        """Return kind and message of an error hidden in a successful end of turn; None for a proper answer.

        Some agents report errors as answer text.
        """
        words = self.last_text.strip()
        if self._agent.error_begins is not None and words.startswith(self._agent.error_begins):
            status = _IN_BRACKETS.search(words)
            return classify(words, int(status[1]) if status else 0), words
        if self._agent.counts_answers and at(self._result, "usage") is None:
            # Warnings precede the error in the same text, one per paragraph.
            return kind_of_failure(words.rpartition("\n\n")[2] or "no reason given")
        if not words and not self._used_tools and self.goals.prompt.lstrip().startswith("/"):
            # opencode treats a path at the beginning of a prompt as an unknown command.
            hint = "the agent may have taken the prompt for a command; begin the prompt with another character than a"
            return ErrorKind.INVALID_REQUEST, f"the answer is empty: {hint} slash"
        return None

    def _failed(self, kind: ErrorKind, message: str) -> BackendError:
        wait, continues = seconds_left(message, self._now()), self.session_id is not None
        return failure(kind, message, wait=wait, usage=self.usage, continues_session=continues)

    def _lost(self, reason: str) -> BackendError:
        return failure(ErrorKind.SESSION_LOST, reason)

    def _show(self, kind: Literal["waiting", "notice"], words: str) -> None:
        self._outputs.append(Output(kind, words, self.usage))

    def _step(self, event: Mapping[str, JsonValue]) -> None:
        """Handle the answer to a request of this client. Unknown and repeated answers are ignored."""
        identity = at(event, "id")
        step = next((step for step in AcpStep if type(identity) is int and step.value == identity), None)
        if step is None or step in self._answered_steps:
            return
        if name_of(step) in self._sent or name_of(step) in self._queue:
            self._answered_steps.add(step)
            self._steps[step](event)

    def _initialized(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            kind, message = error_of(at(event, "error"))
            raise self._failed(kind, f"{self._title}: {message}")
        result = at(event, "result")
        name, version = text(result, "agentInfo", "name"), at(result, "protocolVersion")
        title = shown(text(result, "agentInfo", "title") or name or "the agent", 60)
        if version != VERSION:
            message = f"{title} speaks version {version!r} of ACP; plait needs version {VERSION}"
            raise failure(ErrorKind.INVALID_REQUEST, message)
        self._title, self._agent = title, acp_agent_named(name)
        self._loads = at(result, "agentCapabilities", "loadSession") is True
        abilities = at(result, "agentCapabilities", "sessionCapabilities")
        if isinstance(abilities, dict):
            self._abilities = {name for name, form in abilities.items() if form is not None and form is not False}
        self._login_methods = at(result, "authMethods")
        self._open(AcpStep.OPEN)

    def _open(self, step: AcpStep) -> None:
        """Send the request that opens the session, which makes the agent send the session's earlier messages if a
        prompt is to be found in them. Raise BackendError (session_lost) if the agent cannot open the session.
        """
        if name_of(step) in self._sent:
            return
        call = self._call
        params: Message = {"cwd": self.goals.cwd, "mcpServers": []}
        self._opening = "session/new"
        if call.resume:
            if call.session_id is None:
                raise self._lost("the session id is unknown")
            if self._agent.spoils_loaded:
                raise self._lost(f"{self._title} loses sessions by loading them")
            resumes = "resume" in self._abilities
            if not (self._loads or resumes):
                raise self._lost(f"{self._title} cannot continue a session")
            loads = self._loads and (self._prompts_to_find or not resumes)
            self._opening = "session/load" if loads else "session/resume"
            params = {"sessionId": call.session_id, **params}
        elif call.forks is not None:
            if "fork" not in self._abilities:
                raise self._lost(f"{self._title} cannot fork a session")
            self._opening = "session/fork"
            params = {"sessionId": call.forks, **params}
        self._send(request(step, self._opening, params))

    @property
    def _prompts_to_find(self) -> Sequence[str]:
        return self.goals.holds or (self.goals.earlier_prompts if self._agent.counts_sessions else ())

    def _session_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            wants_login = at(event, "error", "code") == AUTH_REQUIRED
            if wants_login and self.goals.auth_method is not None and AcpStep.AUTHENTICATE not in self._answered_steps:
                self._send(request(AcpStep.AUTHENTICATE, "authenticate", {"methodId": self.goals.auth_method}))
                return
            raise self._refused(event, opens_session=self._opening != "session/new")
        self._session = at(event, "result")
        self.announced = text(self._session, "sessionId") or self.announced
        if self.announced is None:
            message = f"{self._title} opened a session without an id; update the agent"
            raise self._failed(ErrorKind.INVALID_REQUEST, message)
        self._settings = [
            *self._setting(AcpStep.MODEL, "model", self.goals.model),
            *self._setting(AcpStep.MODE, "mode", self.goals.mode),
        ]
        self._send_next()

    def _refused(self, event: Mapping[str, JsonValue], *, opens_session: bool = False) -> BackendError:
        """Return the error of a session or a prompt that the agent refused."""
        kind, message = error_of(at(event, "error"), opens_session=opens_session)
        if at(event, "error", "code") == AUTH_REQUIRED:
            methods = list_login_methods(self._login_methods)
            message += f"; log in with the agent's own command, or set auth_method to one of: {methods}"
        return self._failed(kind, f"{self._title}: {message}")

    def _authenticated(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            kind, message = error_of(at(event, "error"))
            kind = kind if kind is ErrorKind.RATE_LIMITED else ErrorKind.AUTH
            methods = list_login_methods(self._login_methods)
            raise self._failed(kind, f"{self._title}: {message}; login methods: {methods}")
        self._open(AcpStep.OPEN_AGAIN)

    def _setting(self, step: AcpStep, what: str, name: str | None) -> Iterator[Message]:
        """Yield the request that sets the "model" or "mode" with the id or name `name`, unless it is set."""
        offers = self._offers(what)
        chosen = name if name in dict(offers) else next((identity for identity, title in offers if title == name), name)
        if chosen is None or self._current(what) == chosen:
            return
        option = self._option(what)
        params: Message = {"sessionId": self.announced}
        if option is not None and at(self._session, f"{what}s") is None:
            yield request(step, "session/set_config_option", {**params, "configId": at(option, "id"), "value": chosen})
        else:
            yield request(step, f"session/set_{what}", {**params, f"{what}Id": chosen})

    def _offers(self, what: str) -> Sequence[tuple[str, str]]:
        """Return the ids and names of the models or modes offered by the session."""
        if offers := tables(self._session, f"{what}s", f"available{what.title()}s"):
            return [(text(one, "modelId") or text(one, "id"), text(one, "name")) for one in offers]
        groups = tables(self._option(what), "options")
        options = (option for group in groups for option in tables(group, "options") or [group])
        return [(text(option, "value"), text(option, "name")) for option in options]

    def _current(self, what: str) -> str:
        """Return the id of the session's current "model" or "mode"; empty if unknown."""
        return text(self._session, f"{what}s", f"current{what.title()}Id") or text(self._option(what), "currentValue")

    def _option(self, what: str) -> Mapping[str, JsonValue] | None:
        options = tables(self._session, "configOptions")
        return next((one for one in options if what in {text(one, "category"), text(one, "id")}), None)

    def _send_next(self) -> None:
        """Send the next setting, or the prompt."""
        if self._opening == "session/load" and not self._holds(self._prompts_to_find):
            message = "the session does not hold the earlier prompt; start a new session"
            raise self._failed(ErrorKind.SESSION_LOST, message)
        while self._settings:
            setting = self._settings.pop(0)
            if name_of(setting) in self._sent or name_of(AcpStep.PROMPT) not in self._sent:
                self._send(setting)
                return
        self._has_prompt = True
        words: JsonValue = [{"type": "text", "text": self.goals.prompt}]
        self._send(request(AcpStep.PROMPT, "session/prompt", {"sessionId": self.announced, "prompt": words}))

    def _setting_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event:
            what = "model" if at(event, "id") == AcpStep.MODEL.value else "mode"
            names = ", ".join(identity for identity, _ in self._offers(what)) or f"no {what} to choose"
            message = f"{error_of(at(event, 'error'))[1]}; the agent offers {names}"
            raise self._failed(ErrorKind.INVALID_REQUEST, message)
        self._send_next()

    def _prompt_answered(self, event: Mapping[str, JsonValue]) -> None:
        if "error" in event and self.permission_request is None:
            raise self._refused(event)
        self._result = at(event, "result") or {}

    def _holds(self, prompts: Sequence[str]) -> bool:
        """Return whether one of `prompts` was sent earlier, or `prompts` is empty."""
        earlier = " ".join("".join(self._past_prompts).split())
        return not prompts or any(" ".join(prompt.split())[:_TELLING] in earlier for prompt in prompts)

    def _update(self, params: JsonValue) -> None:
        update = at(params, "update")
        kind = text(update, "sessionUpdate")
        if not self._has_prompt:
            if kind == "user_message_chunk":
                self._past_prompts.append(text(update, "content", "text"))
            return
        if text(params, "sessionId") != self.announced:
            return
        outputs: list[Output] = []
        match kind:
            case "agent_message_chunk":
                self._counted += tokens_of(at(update, "_meta", "usage"))
                if piece := text(update, "content", "text"):
                    self._is_silent, self._ends_in_text = False, True
                    message_id = text(update, "messageId") or f"{_UNNUMBERED}{self._notes}"
                    self._messages[message_id] = self._messages.pop(message_id, "") + piece
                    outputs = [Output("text", piece, self.usage)]
            case "tool_call" | "tool_call_update":
                outputs = self._tool(update)
            case "usage_update":
                if text(update, "cost", "currency") in {"", "USD"}:
                    self._cost = number(update, "cost", "amount") if at(update, "cost") else self._cost
            case "user_message_chunk":
                self._notes += 1
            case _:
                pass
        if self.permission_request is None:
            self._outputs += outputs

    def _tool(self, update: JsonValue) -> list[Output]:
        """Read a tool call, or an update of a tool call, and return an output if the description is new."""
        self._used_tools = True
        self._notes += 1
        if not (text(update, "title") or at(update, "rawInput")):
            return []
        identity, words = text(update, "toolCallId"), describe(update)
        if identity not in self._tools:
            self._ends_in_text = False
        if self._tools.get(identity) == words:
            return []
        self._tools[identity] = words
        return [Output("tool", words, self.usage)]

    def _permission_requested(self, identity: JsonValue, params: JsonValue) -> None:
        """Handle a permission request."""
        if self._is_cancelled:
            self._send(answer(identity, _CANCELLED))
            return
        permission, goals, cancellation = permission_request(params), self.goals, self._cancellation()
        was_answered = name_of(answer(identity, None)) in self._sent and name_of(cancellation) not in self._sent
        choice = goals.granted.get(permission.action_id)
        needs_person = goals.permissions == "ask" and bool(permission.options) and choice is None
        if needs_person and not was_answered and self.permission_request is None:
            self.permission_request = permission
            self._show("waiting", permission.question.text)
            self._send(cancellation)
        if self.permission_request is not None:
            self._send(answer(identity, _CANCELLED))
            return
        option = permission.option(choice, goals.permissions)
        selected: JsonValue = {"outcome": "selected", "optionId": option.identity} if option else None
        self._send(answer(identity, {"outcome": selected} if selected else _CANCELLED))
        self._outputs += self._tool(at(params, "toolCall"))
        if option is None or option.kind.startswith("reject"):
            self._is_silent = True
            self._denied.append(permission.about)
            self._show("notice", f"not allowed: {permission.about}")

    def _cancellation(self) -> Message:
        return notification("session/cancel", {"sessionId": self.announced})
