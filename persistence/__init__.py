"""Stores: where plait writes down what it does."""

from persistence.batch import Batch
from persistence.changes import (
    Change,
    LeaseRenewed,
    NewTask,
    PolicyDecided,
    RunClaimed,
    RunCreated,
    RunReleased,
    RunStatusChanged,
    SessionOpened,
    TaskAdopted,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
    TurnAppended,
)
from persistence.errors import Conflict, Fenced, StoreBusy, StoreError, StoreNotOpen, StoreUnusable
from persistence.facets import ContextStore, RunStore, TaskStore
from persistence.files import FilesStore
from persistence.memory.store import MemoryStore
from persistence.notes import Note, NoteRecord
from persistence.protocol import Store
from persistence.records import AttemptRecord, EventRecord, MessageRecord, Owner, RunRecord, TaskRecord
from persistence.sqlite import SQLiteStore

__all__ = [
    "AttemptRecord",
    "Batch",
    "Change",
    "Conflict",
    "ContextStore",
    "EventRecord",
    "Fenced",
    "FilesStore",
    "LeaseRenewed",
    "MemoryStore",
    "MessageRecord",
    "NewTask",
    "Note",
    "NoteRecord",
    "Owner",
    "PolicyDecided",
    "RunClaimed",
    "RunCreated",
    "RunRecord",
    "RunReleased",
    "RunStatusChanged",
    "RunStore",
    "SQLiteStore",
    "SessionOpened",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreNotOpen",
    "StoreUnusable",
    "TaskAdopted",
    "TaskAnswered",
    "TaskCancelled",
    "TaskCompleted",
    "TaskFailed",
    "TaskInterrupted",
    "TaskRecord",
    "TaskReopened",
    "TaskRetried",
    "TaskStarted",
    "TaskStore",
    "TaskWaiting",
    "TasksAdded",
    "TurnAppended",
]
