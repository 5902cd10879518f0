"""Stores: where plait writes down what it does."""

from plait.persistence.batch import Batch
from plait.persistence.changes import (
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
from plait.persistence.errors import Conflict, Fenced, StoreBusy, StoreError, StoreNotOpen, StoreUnusable
from plait.persistence.facets import ContextStore, RunStore, TaskStore
from plait.persistence.files import FilesStore
from plait.persistence.memory.store import MemoryStore
from plait.persistence.notes import Note, NoteRecord
from plait.persistence.protocol import Store
from plait.persistence.records import AttemptRecord, EventRecord, MessageRecord, Owner, RunRecord, TaskRecord
from plait.persistence.sqlite import SQLiteStore

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
