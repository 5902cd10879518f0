"""Where notices of a run go: a URL, or a command. Pure.

A secret is named, never held: the URL of a Slack webhook is one, and so is what a header sends, and the key that signs
the links to questions.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from plait.errors import nearest
from plait.json_form import from_json, value

NOTIFY: Final = "notify"
"""The key of the targets in a plan and in the settings of a run."""
NoticeWord = Literal["question", "budget", "parked", "failed", "done"]
NOTICE_WORDS: Final[tuple[NoticeWord, ...]] = ("question", "budget", "parked", "failed", "done")
"""What a notice can tell: a task asks a person; a task asks for a higher budget; all tasks of the run wait for a time;
the run has failed; the run is completed.
"""
LINK_KEY: Final = "PLAIT_LINK_KEY"
"""The environment variable with the key that signs links to questions: the same where notices are sent and where the
page is served.
"""
LINK_PAGE: Final = "/page/question.html"
"""The page of one question. The part of a link behind `#` says which, and a browser sends this part to no server."""
_LEAST_KEY = 16
"""Characters. A shorter key could be guessed from one link."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SLACK = "hooks.slack.com"


@value
class NotifyTarget:
    """A target of notices. It has one of `url`, `url_env` and `run`."""

    url: str | None = None
    """An address that is no secret. The notice is posted there as JSON."""
    url_env: str | None = None
    """The environment variable that holds the address."""
    run: tuple[str, ...] = ()
    """A program and its arguments. The notice is its standard input, as JSON."""
    form: Literal["json", "slack"] = "json"
    """slack: post `{"text": ...}` alone, as webhooks of Slack, Mattermost and others take it."""
    headers_env: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each further header of the request, the environment variable that holds its value."""
    pass_env: tuple[str, ...] = ()
    """Further environment variables for the program."""
    link: str | None = None
    """The address under which a person reaches `plait serve` or `plait ui`: a notice of a question has a signed link to
    its form there.
    """
    on: tuple[NoticeWord, ...] = NOTICE_WORDS
    """What is told."""

    @classmethod
    def of(cls, form: NotifyTarget | Mapping[str, Any]) -> NotifyTarget:
        """Return the target with the keys of a plan. Raises ValueError for a target that cannot be used."""
        target = form if isinstance(form, NotifyTarget) else cls._read(form)
        for _, why in target.mistakes():
            raise ValueError(why)
        return target

    @classmethod
    def _read(cls, mapping: Mapping[str, Any]) -> NotifyTarget:
        form: dict[str, Any] = {name: [*one] if type(one) is tuple else one for name, one in mapping.items()}
        keys = [one.name for one in fields(cls)]
        if unknown := next((name for name in form if name not in keys), None):
            hint = nearest(unknown, keys) or f"; there are {', '.join(keys)}"
            raise ValueError(f"notify has no key {unknown!r}{hint}")
        for word in form.get("on", ()):
            if word not in NOTICE_WORDS:
                words = ", ".join(NOTICE_WORDS)
                raise ValueError(f"notify sends {words}, not {word!r}{nearest(str(word), NOTICE_WORDS)}")
        return from_json(cls, form)

    def mistakes(self) -> Iterable[tuple[str, str]]:
        """Yield each reason why the target cannot be used, with the key."""
        ways = [name for name in ("url", "url_env", "run") if getattr(self, name)]
        if len(ways) != 1:
            have = f"this one has {' and '.join(ways)}" if ways else "this one has none of them"
            yield (ways or ["url_env"])[-1], f"a target has one of url, url_env and run, and {have}"
        if self.url is not None and (why := why_no_address(self.url)):
            yield "url", why
        if self.url is not None and (urlsplit(self.url).hostname or "") == _SLACK:
            yield "url", "a webhook of Slack is a secret; put it into an environment variable, and name that in url_env"
        if self.run and (self.headers_env or self.form != "json"):
            yield "run", "headers_env and form are for a URL; leave them out"
        if self.run and "/" in self.run[0] and not self.run[0].startswith("/"):
            yield "run", "the program has to be one of the PATH, or an absolute path"
        if self.pass_env and not self.run:
            yield "pass_env", "pass_env is for a command; leave it out"
        if self.link is not None and (
            why_no_address(self.link) or urlsplit(self.link)[2:] not in {("", "", ""), ("/", "", "")}
        ):
            yield "link", "link is the address of the server alone, like https://plait.example.org"
        if not self.on:
            yield "on", f"name what to send: {', '.join(NOTICE_WORDS)}"
        for name in self.headers_env:
            if not _HEADER.fullmatch(name):
                yield "headers_env", f"{name[:60]!r} is no name of a header"
        variables = [("headers_env", one) for one in self.headers_env.values()]
        variables += [("pass_env", one) for one in self.pass_env]
        variables += [] if self.url_env is None else [("url_env", self.url_env)]
        for key, variable in variables:
            if not _VARIABLE.fullmatch(variable):
                # What does not look like a name may be the secret itself.
                yield key, f"{key} holds names of environment variables, never their values"

    @property
    def is_harmless(self) -> bool:
        """Whether any process may use the target as it is stored: it runs no program, sends no variable of the
        environment, signs no link, and only the environment says where it goes.
        """
        return self.url_env is not None and not self.headers_env and not self.run and self.link is None

    def __str__(self) -> str:
        if self.run:
            return self.run[0]
        return f"${self.url_env}" if self.url is None else urlsplit(self.url).hostname or "url"

    def missing_variables(self, environment: Mapping[str, str]) -> Sequence[str]:
        """Return the variables of the request and of its link that `environment` lacks."""
        named = [*self.headers_env.values(), *([] if self.url_env is None else [self.url_env])]
        missing = [name for name in named if not environment.get(name, "").strip()]
        if self.link is not None and _link_key(environment) is None:
            missing.append(f"{LINK_KEY} ({_LEAST_KEY} characters or more, the same for the server of the link)")
        return missing

    def link_to(self, environment: Mapping[str, str], run_id: str, task_id: str, attempt: int) -> str | None:
        """Return the signed link to the question of the attempt; None if the target has no links."""
        key = _link_key(environment)
        if self.link is None or key is None:
            return None
        return f"{self.link.rstrip('/')}{LINK_PAGE}#{_signed(key, f'{run_id}/{task_id}/{attempt}')}"


def linked_question(environment: Mapping[str, str], signed: str) -> tuple[str, str, int]:
    """Return the run, the task and the attempt that a link names behind its `#`. Raises ValueError for a wrong link."""
    key = _link_key(environment)
    if key is None:
        raise ValueError(f"this server takes no links: set {LINK_KEY} as it is where the notice was sent")
    question, _, _ = signed.rpartition("/")
    if not hmac.compare_digest(signed.encode(), _signed(key, question).encode()):
        raise ValueError("the link is wrong: a part is missing or was changed, or the server has another key")
    run_id, task_id, attempt = question.split("/")
    return run_id, task_id, int(attempt)


def _link_key(environment: Mapping[str, str]) -> str | None:
    key = environment.get(LINK_KEY, "").strip()
    return key if len(key) >= _LEAST_KEY else None


def _signed(key: str, question: str) -> str:
    return f"{question}/{hmac.digest(key.encode(), f'question {question}'.encode(), 'sha256').hex()}"


def why_no_address(url: str) -> str | None:
    """Return why notices cannot be posted to `url`, without repeating it; None if they can."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
            return "the address has to be like https://host/path"
    except ValueError:
        return "the address has to be like https://host/path"
    if "@" in parts.netloc:
        return "the address must not hold a user or password; put a header's value into a variable (headers_env)"
    return None


def usable_targets(
    stored: Sequence[NotifyTarget | None], trusted: Collection[NotifyTarget], environment: Mapping[str, str]
) -> tuple[list[NotifyTarget | None], list[tuple[NotifyTarget | None, str]]]:
    """Return the stored targets, None in place of each that this process may not or cannot use, and these with the
    reason. `trusted` come from a program or from a plan file, and not from the store alone.
    """
    usable: list[NotifyTarget | None] = []
    refused: list[tuple[NotifyTarget | None, str]] = []
    for target in stored:
        why = None
        if target is None:
            why = "this version of plait cannot read the target"
        elif not target.is_harmless and target not in trusted:
            why = "the plan file has no such target now, and the store alone is not trusted"
        elif missing := target.missing_variables(environment):
            why = f"no value in {', '.join(missing)}"
        usable.append(target if why is None else None)
        if why is not None:
            refused.append((target, why))
    return usable, refused
