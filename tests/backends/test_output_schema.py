"""The forms in which models give JSON, and what is taken for it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from plait.backends import ConversationRequest, FunctionBackend
from plait.errors import BackendError

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
GOOD, OTHER = '{"code": "x"}', '{"code": "y"}'


async def read(answer: str, schema: dict[str, Any]) -> Any:
    async def function(prompt: str) -> str:
        return answer

    async with FunctionBackend(function).open(ConversationRequest(output_schema=schema)) as conversation:
        return (await conversation.send("?")).data


@pytest.mark.parametrize(
    "answer",
    [
        f"\ufeff{GOOD}",
        f'<think>\nlet me see {{"code"}}\n</think>\n{GOOD}',
        f"I could say {{}}, but\n</think>\n\n{GOOD}",
        f'<think>\n```json\n{{"code": "y"}}\n```\n</think>\n```json\n{GOOD}\n```',
        f"First:\n```python\nprint(1)\n```\nthen\n```json\n{GOOD}\n```",
        f"Like this:\n```json\n{{}}\n```\nand so:\n```json\n{GOOD}\n```",
        f"Here is the JSON: {GOOD}",
        f"{GOOD}\n\nI hope that this helps.",
        f"```json\n{GOOD}",
        f"```json {GOOD} ```",
        f"```json5\n{GOOD}\n```",
        f"~~~json\n{GOOD}\n~~~",
        f"~~~\r\n  {GOOD}\r\n~~~",
        f"<thinking>\nMaybe {OTHER}\nNo.\n</thinking>\n{GOOD}",
        f"Okay.\n<think>first {OTHER}\n</think>{GOOD}",
        f"<|channel|>analysis<|message|>{OTHER}<|end|><|start|>assistant<|channel|>final<|message|>{GOOD}",
        f"So [see below] it is:\n{GOOD}",
        f"The set {{x | x > 0}} gives\n{GOOD}",
        f"{GOOD}\n\nOnce more:\n```json\n{GOOD}\n```",
        f"The answer is {GOOD}, that is:\n{GOOD}",
        f"Sure, here you go: {GOOD} Hope it helps!",
        f"```python\nx = {OTHER}\n```\n{GOOD}",
        f"```json\n// the answer\n{GOOD}\n```",
        f"<answer>{GOOD}</answer>",
    ],
)
async def test_forms_of_json_that_models_give(answer: str) -> None:
    assert await read(answer, CODE) == {"code": "x"}


@pytest.mark.parametrize("before", ["", "<think>```</think>", "So:\n"])
async def test_a_fence_within_the_fenced_json(before: str) -> None:
    answer = before + '```json\n{"code": "```python\\nprint(1)\\n```"}\n```'
    assert await read(answer, CODE) == {"code": "```python\nprint(1)\n```"}


@pytest.mark.parametrize(
    ("answer", "schema", "words"),
    [
        ("It is [1] that I go by.", {"type": "array"}, "it is not JSON"),
        ("It is {} that I go by.", {"type": "object"}, "it is not JSON"),
        ("It is so, see [1]", {"type": ["array", "string"]}, "it is not JSON"),
        ("```\n[1] is what I go by.\n```", {"type": "array"}, "its fenced block is not JSON: Extra data"),
        ('```json\n{"code": 1}\n```\n```json\n{"code": 2}\n```', CODE, r"at \$\.code: 1 is not"),
        ('{"code": 1} or\n```json\n{}\n```', CODE, "code. is a required property"),
        (f"{OTHER}\n{GOOD}", CODE, "two different values that fit"),
        (f"{OTHER} {GOOD}", CODE, "two different values that fit"),
        (f"I tried {OTHER} first.\n{GOOD}", CODE, "two different values that fit"),
        (f"As:\n```json\n{OTHER}\n```\nSo:\n```json\n{GOOD}\n```", CODE, "two different values that fit"),
        (f"```json\n{OTHER}\n```\n{GOOD}", CODE, "two different values that fit"),
        (f"```json\n{OTHER}\n{GOOD}\n```", CODE, "two different values that fit"),
        ('{"code": 1}\n{"code": true}', CODE, r"at \$\.code: 1 is not"),
        ("[1]\n[true]", {"type": "array"}, "two different values that fit"),
        (f'{{"list": [\n{GOOD},\n]}}', CODE, "it is not JSON"),
        (f"[\n// the first\n{GOOD}\n]", CODE, "it is not JSON"),
        (f'{{"list": [\n{GOOD}\n', CODE, "it is not JSON"),
        (f"```python\nx = [\n{GOOD},\n]\n```", CODE, "its fenced block is not JSON"),
        ("<think>\n" + GOOD + "\n</think>\nNo.", CODE, "it is not JSON"),
        ("```json\n" * 30_000 + "[" * 30_000, {"type": "array"}, "its fenced block is not JSON"),
    ],
)
async def test_what_only_looks_like_json_is_not_taken(answer: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        await read(answer, schema)


async def test_a_schema_is_looked_through_once_however_many_tasks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = jsonschema_rs.validator_for
    monkeypatch.setattr(
        jsonschema_rs, "validator_for", lambda text, **how: seen.append(json.loads(text)) or make(text, **how)
    )
    schema: dict[str, Any] = {"type": "object", "required": ["once"]}
    for _ in range(3):
        assert await read('{"once": 1}', dict(schema)) == {"once": 1}
    assert seen == [schema]
    schema["required"] = ["code"]  # the same object, and another schema
    with pytest.raises(BackendError, match=r"code. is a required property"):
        await read('{"once": 1}', schema)
    assert len(seen) == 2
