"""The sign-in of a browser over HTTP: a code becomes the token, once, and a refused code names the reason."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from plait.clock_and_ids import Clock
from plait.runner.serving.http_guard import CODE_SECONDS, MOST_OPEN_BODY_BYTES, SignIn
from tests.support.processes.browser import Ui, ui
from tests.support.processes.served import served


class Shifted(Clock):
    """The system clock, `seconds` late."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() - self._seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ui]:
    with ui(tmp_path_factory.mktemp("signed")) as server:
        yield server


def sign_in(server: Ui, code: str, **headers: str) -> httpx.Response:
    given = {"content-type": "application/json", **headers}
    body = json.dumps({"code": code})
    return httpx.post(f"{server.url}/page/sign-in", content=body, headers=given, trust_env=False, verify=False)


def asked(server: Ui, token: str) -> int:
    return httpx.get(
        f"{server.url}/api/runs", headers={"authorization": f"Bearer {token}"}, trust_env=False
    ).status_code


def reason(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["kind"]) == (401, "unauthorized")
    assert error["message"].endswith("run `plait ui` again on the same store, and open the new address")
    return error["message"]


def new_code(server: Ui, late: float = 0, token: str | None = None, address: str | None = None) -> str:
    """A code that a program makes that has read the file of the token."""
    made = SignIn(token or server.token, address or urlsplit(server.url).netloc, Shifted(late))
    return made.new_code()


def test_the_code_of_the_address_becomes_the_token_once(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        code = urlsplit(server.page).fragment
        assert urlsplit(server.page)._replace(fragment="").geturl() == f"{server.url}/"
        answer = sign_in(server, code)
        assert (answer.status_code, answer.headers.get("set-cookie")) == (200, None)
        token = answer.json()["token"]
        assert (asked(server, token), asked(server, code), asked(server, "x")) == (200, 401, 401)
        assert "was used already" in reason(sign_in(server, code))
        assert asked(server, token) == 200
        said = server.stop()[1]
        assert token not in said
        assert server.page in said.splitlines(), "the address has a line of its own, so a double click copies it whole"


def test_the_token_is_for_one_life_of_the_server(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        port = urlsplit(server.url).port or 0
        token = sign_in(server, urlsplit(server.page).fragment).json()["token"]
        old = new_code(server)
        server.process.kill()
        server.process.wait(60)
    with ui(tmp_path, port=port) as again:
        assert (again.url, asked(again, token)) == (server.url, 401)
        assert "of another server, or of one that has ended" in reason(sign_in(again, old))


def test_a_refused_code_names_the_reason(server: Ui) -> None:
    code = new_code(server)
    content, _, mac = code.rpartition(".")
    end, nonce = content.split(".")
    later = f"{int(end) + 1000}.{nonce}.{mac}"
    for wrong in (code[:-1], code + ";", later, f"{content}.", f"{content}.{mac[::-1]}"):
        assert "the code is not whole" in reason(sign_in(server, wrong))
    for cut in ("", code[:5], code[:12], "\udc00", code + "\u00e9", mac):
        assert "code is not whole" in reason(sign_in(server, cut))
    for other in (new_code(server, token="t" * 43), new_code(server, address="127.0.0.2:1"), "x" + code):
        assert "of another server, or of one that has ended" in reason(sign_in(server, other))
    assert "the code expired at 20" in reason(sign_in(server, new_code(server, late=CODE_SECONDS)))
    assert sign_in(server, new_code(server, late=CODE_SECONDS - 20)).status_code == 200
    assert sign_in(server, code).status_code == 200, "no wrong code has used it up"


def test_a_proof_is_no_code(server: Ui) -> None:
    """Anybody may ask for a proof, of whatever."""
    content = new_code(server).rpartition(".")[0]
    url = f"{server.url}/page/proof"
    for challenge in (content, f"{urlsplit(server.url).netloc} {content}", f"code {content}"):
        proof = httpx.get(url, params={"challenge": challenge}, trust_env=False, verify=False).text
        assert "the code is not whole" in reason(sign_in(server, f"{content}.{proof}"))
        assert asked(server, proof) == 401


def test_without_the_token_a_request_has_4_kib_at_most(server: Ui) -> None:
    assert MOST_OPEN_BODY_BYTES == 4096  # as docs/guides/http.md states
    code = new_code(server)
    given = {"content-type": "application/json"}

    def post(length: int) -> httpx.Response:
        body = json.dumps({"code": code}).encode().ljust(length)
        return httpx.post(f"{server.url}/page/sign-in", content=body, headers=given, trust_env=False, verify=False)

    answer = post(4097)
    assert (answer.status_code, answer.json()["error"]["message"]) == (413, "this request may have 4,096 bytes")
    pieces = iter([b"{", b" " * 5000, b"}"])  # the length is not stated
    answer = httpx.post(f"{server.url}/page/sign-in", content=pieces, headers=given, trust_env=False, verify=False)
    assert answer.status_code == 413
    assert post(4096).status_code == 200
    with server.client() as client:
        assert client.post("/api/runs/x/cancel", content=b"{}".ljust(5000), headers=given).status_code == 404


def test_the_page_has_one_host_name(server: Ui) -> None:
    """Under `localhost` another user's server at ::1 could have the same origin, and read what the page has stored."""
    port = urlsplit(server.url).port
    for host in (f"localhost:{port}", f"[::1]:{port}", "evil.example", f"evil.example:{port}", f"127.0.0.1:1{port}"):
        for path in ("/", "/page/page_main.js", "/page/proof?challenge=x"):
            given = {"host": host, "accept": "text/html"}
            answer = httpx.get(server.url + path, headers=given, trust_env=False, verify=False)
            assert answer.status_code == 403
            assert f"the host here is 127.0.0.1:{port}, not" in answer.json()["error"]["message"]
        assert sign_in(server, new_code(server), host=host).status_code == 403


def test_a_browser_adds_nothing_to_a_request_of_another_page(server: Ui) -> None:
    """The request of another page has no token, and a request that is asked for beforehand is not allowed."""
    other = {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"}
    with httpx.Client(base_url=server.url, headers=other, trust_env=False, verify=False) as client:
        client.post("/page/sign-in", json={"code": new_code(server)})
        assert client.get("/api/runs").status_code == 401
        assert client.post("/api/runs/x/cancel", json={}).status_code == 401
        preflight = client.options("/api/runs", headers={"access-control-request-headers": "authorization"})
        assert preflight.status_code == 401
        assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_a_server_of_programs_signs_browsers_in_as_well(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        code = SignIn(server.token, urlsplit(server.url).netloc, Clock()).new_code()
        answer = httpx.post(f"{server.url}/page/sign-in", json={"code": code}, trust_env=False, verify=False)
        assert answer.json() == {"token": server.token}
