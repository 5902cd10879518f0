"""When an answer is whole, and which part of a text is the answer."""

from __future__ import annotations

import time

import pytest

from plait.backends.whole_answer import split_thoughts, whole_answer, without_calls
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage

K = ErrorKind


def kind_of(text: str, *reasons: str, **more: object) -> ErrorKind:
    with pytest.raises(BackendError) as caught:
        whole_answer(text, reasons, **more)  # type: ignore[arg-type]
    return caught.value.kind


@pytest.mark.parametrize(
    "reasons",
    [
        ("stop",),
        ("STOP",),
        ("FinishReason.STOP",),
        ("eos_token",),
        ("COMPLETE",),
        ("end_turn",),
        ("null", "", "none", "stop"),
        ("finish_reason_unspecified", "stop"),
        ("stop", "stop"),
        ("stopstop",),
        ("end_turnend_turnend_turn",),
        (),
    ],
)
def test_known_good_ends(reasons: tuple[str, ...]) -> None:
    assert whole_answer("all of it", reasons).content == "all of it"


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        (("length", "stop"), K.TRUNCATED),
        (("stop", "length"), K.TRUNCATED),
        (("content_filter", "length"), K.REFUSED),
        (("length", "content_filter"), K.TRUNCATED),
        (("FinishReason.MAX_TOKENS",), K.TRUNCATED),
        (("error", "stop"), K.TRANSIENT),
        (("guardrail_intervened",), K.REFUSED),
        (("tool_use",), K.INVALID_OUTPUT),
        (("MALFORMED_FUNCTION_CALL",), K.INVALID_OUTPUT),
        (("max_turn_requests",), K.LIMIT_REACHED),
        (("cancelled",), K.TRANSIENT),
        (("lengthlength",), K.TRUNCATED),
        (("a reason of next year", "stop"), K.TRANSIENT),
    ],
)
def test_the_first_end_that_is_not_whole_decides(reasons: tuple[str, ...], kind: ErrorKind) -> None:
    assert kind_of("half", *reasons) is kind


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        ("length max_tokens max_output_tokens max_length model_length error_limit", K.TRUNCATED),
        ("model_context_window_exceeded", K.TRUNCATED),
        ("refusal safety recitation prohibited_content blocklist spii sensitive language image_safety", K.REFUSED),
        ("error_toxic content_filter content_filtered", K.REFUSED),
        ("tool_calls tool_call function_call unexpected_tool_call too_many_tool_calls", K.INVALID_OUTPUT),
        ("malformed_tool_use malformed_response malformed_model_output", K.INVALID_OUTPUT),
    ],
)
def test_the_words_of_all_wires_for_an_end_that_is_not_whole(reasons: str, kind: ErrorKind) -> None:
    for reason in reasons.split():
        assert kind_of("half", reason) is kind, reason


def test_an_answer_whose_end_is_missing_broke_off() -> None:
    with pytest.raises(BackendError, match="broke off after 3 events") as caught:
        whole_answer("half", ["null"], missing="the answer broke off after 3 events")
    assert caught.value.kind is K.TRANSIENT
    assert whole_answer("all", ["stop"], missing="never said").content == "all"


def test_a_call_of_a_tool_that_nobody_answers_is_no_answer_whatever_the_reason() -> None:
    for reasons in [("stop",), ()]:
        with pytest.raises(BackendError, match="called a tool, and none was offered") as caught:
            whole_answer("I will look it up", reasons, calls_tool=True)
        assert caught.value.kind is K.INVALID_OUTPUT
    assert kind_of("half", "length", calls_tool=True) is K.TRUNCATED
    with pytest.raises(BackendError) as caught:
        whole_answer("half", (), calls_tool=True, missing="the answer broke off")
    assert caught.value.kind is K.TRANSIENT


@pytest.mark.parametrize("reason", ["content_filter", "length", "tool_calls", "max_turn_requests", "who knows"])
def test_what_half_an_answer_cost_is_counted(reason: str) -> None:
    usage = Usage(10, 20)
    with pytest.raises(BackendError) as caught:
        whole_answer("half", [reason], usage=usage)
    assert caught.value.usage == usage


def test_a_call_of_a_tool_that_is_answered_ends_no_answer() -> None:
    reasons = ["tool_calls", "TOOL_USE", "FinishReason.FUNCTION_CALL", "tool_deferred", "tool_calltool_call"]
    assert without_calls([*reasons, "length", "malformed_function_call", "stop"]) == [
        "length",
        "malformed_function_call",
        "stop",
    ]


def test_words_of_refusal_decide_whatever_the_reason() -> None:
    assert kind_of("I cannot", "stop", refusal="I will not") is K.REFUSED
    assert whole_answer("fine", ["stop"], refusal=" ").content == "fine"


@pytest.mark.parametrize(
    "text", ["", " \n\t", "\u200b\n", "\ufeff", "<think>\nall thoughts\n</think>\n", "<think>\nnever closed"]
)
def test_an_answer_without_text_is_none(text: str) -> None:
    assert kind_of(text, "stop") is K.INVALID_OUTPUT
    assert whole_answer(text, ["stop"], needs_text=False).content.strip("\u200b\ufeff \n\t") == ""


def test_a_cut_answer_keeps_the_text_that_arrived() -> None:
    with pytest.raises(BackendError) as caught:
        whole_answer("half", ["length"])
    assert [message.content for message in caught.value.messages] == ["half"]
    with pytest.raises(BackendError) as caught:
        whole_answer("<think>a</think>half", ["length"])
    assert [(message.content, message.thoughts) for message in caught.value.messages] == [("half", "a")]


@pytest.mark.parametrize(
    ("text", "answer", "thoughts"),
    [
        ("<think>\nsecret plan\n</think>\n\nfour", "four", "secret plan"),
        ("\ufeff <thinking>a</thinking>four", "four", "a"),
        ("<Thought>a</Thought>\n<reasoning>b</reasoning>\nfour", "four", "a\n\nb"),
        ("<seed:think>a</seed:think>four", "four", "a"),
        ("[THINK]a[/THINK]four", "four", "a"),
        ("◁think▷a◁/think▷four", "four", "a"),
        ("<|channel>thought\na<channel|>four", "four", "a"),
        ("<think>I mention </think> here\n</think>\nfour", "four", "I mention\n\nhere"),
        ("so it is four\n</think>\n\nfour", "four", "so it is four"),
        ("It is four.</think>\n\nfour", "four", "It is four."),
        ("Answer briefly.</think>four", "four", "Answer briefly."),
        ("so four</think>\nfour", "four", "so four"),
        ("so four. </think>\nfour", "four", "so four."),
        ('so four\n</think>{"n": 4}', '{"n": 4}', "so four"),
        ("<think>I say `</think>` here.\n</think>\nfour", "four", "I say `</think>` here."),
        ("Okay.\n<think>first\n</think>four", "Okay.\nfour", "first"),
        ("four\n<think>\nwas that right?\n</think>", "four", "was that right?"),
        ("four\n<think>\nwas that", "four", "was that"),
        ("Sure: <think>\na\n</think>\nfour", "Sure: \nfour", "a"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
            "four",
            "a",
        ),
        ("a<|end|><|start|>assistant<|channel|>final<|message|>four", "four", "a"),
        ("a<|end|><|channel|>final<|message|>four", "four", "a"),
        ('<|channel|>commentary<|message|>{"path": "/"}<|end|>', "", '{"path": "/"}'),
        ("<|start|>assistant<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", "", "{}"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}", ""),
        ("<|channel|>analysis<|message|>a", "", "a"),
        ("analysisWe need four.assistantfinalfour", "four", "We need four."),
        ("Here is my thought process: a\nHere is my response: four", "four", "a"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>four<|END_RESPONSE|>", "four", "a"),
    ],
)
def test_thoughts_are_kept_apart_from_the_answer(text: str, answer: str, thoughts: str) -> None:
    message = whole_answer(text, ["stop"], needs_text=False)
    assert (message.content, message.thoughts) == (answer, thoughts)
    assert split_thoughts(answer) == (answer, "")


@pytest.mark.parametrize(
    "text",
    [
        "Models write <think>thoughts</think> before the answer.",
        "Close the block with `</think>`.\nThen answer.",
        "So:\n```\n<think>\na\n</think>\nfour\n```\nThat is the form.",
        "The end mark of thoughts is\n```\n</think>\n```\nand nothing else.",
        "Use <think> to open.\nIt has no end here.",
        "The marks:\n<think> opens the thoughts.",
        "So:\n```\n<think>\na\n```\nThat is the mark.",
        "The closing mark is </think>, as in (</think>) or '</think>' here.",
        "It ends so. </think> is the mark.",
        "</think> is the mark.",
        "```\na<|end|><|start|>assistant<|channel|>final<|message|>four\n```",
        "four\n</think>",
        "gpt-oss begins with `<|start|>assistant<|channel|>final<|message|>`.",
        "The mark `<|channel|>analysis<|message|>` begins thoughts.",
        "analysis of the data: assistantfinal",
        " four \n",
        "a < b and <b>bold</b>",
    ],
)
def test_an_answer_that_speaks_of_the_marks_stays_as_it_is(text: str) -> None:
    assert split_thoughts(text) == (text, "")


@pytest.mark.parametrize(
    "text",
    [
        "<think></think>" * 20_000,
        "\n<think>" * 40_000,
        "x <think>" * 40_000 + "</think>",
        "a.</think>\n" * 20_000,
        "```\n<think>a</think>\n" * 15_000,
        "<|channel|>" + "a" * 300_000,
        "<|start|>" * 30_000 + "<|channel|>",
        "<" + "a_" * 150_000,
        "." + " " * 300_000 + "</thin",
        "\n" * 300_000 + "</think>",
    ],
    ids=range(10),
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    split_thoughts(text)
    assert time.process_time() - began < 2


def test_a_block_that_ends_on_a_line_of_its_own_is_thoughts_unless_its_mark_is_quoted() -> None:
    quoted = "Answer.\nA mark `<think>\nx\n</think>\nrest"
    assert split_thoughts(quoted) == (quoted, "")
    assert split_thoughts(quoted.replace("`", "")) == ("Answer.\nA mark \nrest", "x")
