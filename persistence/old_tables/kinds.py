"""The kinds of rows that a batch adds or changes, one a statement of a store. `schema.sql` describes the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, eq=False)
class RowKind:
    """A kind of row. Compared by identity, which is the cheapest key of a dictionary."""

    table: str
    columns: str
    """The names of the columns in the order of the values, separated by spaces."""


_USAGE: Final = (
    "input_tokens output_tokens cache_read_tokens cache_write_tokens reasoning_tokens cost_is_partial cost_usd "
    "duration_s model"
)
ADD_TASKS: Final = RowKind("given_tasks", "id run task_id backend added_by row_checksum depends_on spec prompt")
ADD_TASK_COPIES: Final = RowKind("given_tasks", "id run task_id backend added_by row_checksum copy_of")
"""Tasks with the texts of a task of an earlier run."""
ADD_STARTS: Final = RowKind("starts", "id task attempt backend session_id session_confirmed started_at row_checksum")
ADD_COMPLETIONS: Final = RowKind(
    "ends",
    "id end_id ended_at input_tokens output_tokens cost_usd duration_s model row_checksum checksum prompt_checksum "
    "text data prompt",
)
"""Completions without a large part and without tokens counted apart; the status is completed."""
ADD_COMPLETION_COPIES: Final = RowKind(
    "ends",
    "id end_id ended_at input_tokens output_tokens cost_usd duration_s model row_checksum checksum prompt_checksum "
    "copy_of",
)
"""Completions with the texts of a completion of an earlier run; the status is completed."""
ADD_LARGE_COMPLETIONS: Final = RowKind(
    "ends",
    "id end_id ended_at input_tokens output_tokens cost_usd duration_s model cache_read_tokens cache_write_tokens "
    "reasoning_tokens cost_is_partial row_checksum checksum prompt_checksum text data prompt text_sha256 data_sha256 "
    "prompt_sha256",
)
ADD_ENDS: Final = RowKind("ends", f"id end_id status ended_at {_USAGE} error_kind error question asked row_checksum")
ADD_TRACEBACKS: Final = RowKind("tracebacks", "id content row_checksum")
FINISH_ENDS: Final = RowKind(
    "ends",
    f"id end_id status ended_at {_USAGE} error_kind error row_checksum checksum text data text_sha256 data_sha256",
)
"""For attempts of waiting tasks that are completed or failed without another attempt."""
DISCARD_RESULTS: Final = RowKind("ends", "id")
"""For damaged results, and for the messages that are stored with the results."""
SET_SESSIONS: Final = RowKind("starts", "id session_id session_confirmed row_checksum")
SET_TASKS: Final = RowKind("given_tasks", "id set_to crashes answers row_checksum")
SET_PROMPTS: Final = RowKind("given_tasks", "id depends_on spec prompt")
"""For tasks with a changed prompt, which are copies no more."""
ADD_MESSAGES: Final = RowKind("other_messages", "id task attempt role at input_tokens output_tokens checksum content")
ADD_LARGE_MESSAGES: Final = RowKind(
    "other_messages", "id task attempt role at input_tokens output_tokens checksum content_sha256"
)
ADD_SESSIONS: Final = RowKind("sessions", "run_id task_id session_id attempt opened_at row_checksum")
ADD_EVENTS: Final = RowKind("other_events", "run_id seq at kind task_id attempt detail row_checksum")

IN_ORDER: Final = (
    ADD_TASKS,
    ADD_TASK_COPIES,
    ADD_STARTS,
    ADD_COMPLETIONS,
    ADD_COMPLETION_COPIES,
    ADD_LARGE_COMPLETIONS,
    ADD_ENDS,
    ADD_TRACEBACKS,
    FINISH_ENDS,
    DISCARD_RESULTS,
    SET_SESSIONS,
    SET_TASKS,
    SET_PROMPTS,
    ADD_MESSAGES,
    ADD_LARGE_MESSAGES,
    ADD_SESSIONS,
    ADD_EVENTS,
)
"""The order of the statements of a batch: rows are added before rows are changed."""
